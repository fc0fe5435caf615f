// auto_extension.c: a program that links the VFS `bifolio` with its SQLite, and makes it the default.
//
// cc auto_extension.c -o program libbifolio_sqlite.a -lsqlite3 -lgcc_s -lutil -lpthread -lm -ldl
// With the amalgamation: sqlite3.c instead of -lsqlite3.

#include <sqlite3.h>
#include <stdio.h>

// The entry point of libbifolio_sqlite.a.
int sqlite3_bifoliodefault_init(sqlite3 *connection, char **message, const void *api);

static int print_row(void *unused, int count, char **values, char **names) {
    (void)unused, (void)names;
    for (int column = 0; column < count; column++) {
        puts(values[column] ? values[column] : "");
    }
    return 0;
}

int main(void) {
    // SQLite calls the entry point with each new connection: the first one registers the VFS.
    int code = sqlite3_auto_extension((void (*)(void))sqlite3_bifoliodefault_init);
    sqlite3 *first = NULL;
    if (code == SQLITE_OK) {
        code = sqlite3_open(":memory:", &first);
    }
    sqlite3_close(first);

    sqlite3 *database = NULL;
    char *message = NULL;
    if (code == SQLITE_OK) {
        code = sqlite3_open("x.db", &database);
    }
    if (code == SQLITE_OK) {
        code = sqlite3_exec(database,
                            "create table t(a); insert into t values(7); pragma bifolio_memory",
                            print_row, NULL, &message);
    }
    if (code != SQLITE_OK) {
        fprintf(stderr, "%s\n", message ? message : sqlite3_errmsg(database));
    }
    sqlite3_free(message);
    sqlite3_close(database);
    return code == SQLITE_OK ? 0 : 1;
}
