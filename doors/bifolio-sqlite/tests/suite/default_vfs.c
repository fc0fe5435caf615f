/*
** Makes the VFS of BIFOLIO_EXTENSION the default each time SQLite initializes itself, which makes
** its own VFS the default. SQLite's tests do that repeatedly, and start other processes that do.
** Appended to sqlite3.c, which calls it because of -DSQLITE_EXTRA_INIT=bifolio_suite_init.
*/
int bifolio_suite_init(const char *unused){
  const char *extension = getenv("BIFOLIO_EXTENSION");
  sqlite3_vfs *vfs = sqlite3_vfs_find("bifolio");
  (void)unused;
  if( extension==0 ) return SQLITE_OK;
  if( vfs==0 ){
    char *message = 0;
    sqlite3 *connection = 0;
    if( sqlite3_open(":memory:", &connection)!=SQLITE_OK
     || sqlite3_enable_load_extension(connection, 1)!=SQLITE_OK
     || sqlite3_load_extension(connection, extension, 0, &message)!=SQLITE_OK
     || (vfs = sqlite3_vfs_find("bifolio"))==0
    ){
      fprintf(stderr, "cannot load %s: %s\n", extension, message ? message : "no such VFS");
      exit(70);
    }
    sqlite3_close(connection);
  }
  return sqlite3_vfs_register(vfs, 1);
}
