/* Loads the extension, then runs SQLite's speed test, whose own main has another name. */
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>

#undef main
int speedtest1_main(int argc, char **argv);

int main(int argc, char **argv) {
    sqlite3 *connection;
    char *message = NULL;
    const char *extension = getenv("BIFOLIO_EXTENSION");
    if (sqlite3_open(":memory:", &connection) != SQLITE_OK) return 1;
    sqlite3_enable_load_extension(connection, 1);
    if (sqlite3_load_extension(connection, extension, NULL, &message) != SQLITE_OK) {
        fprintf(stderr, "cannot load %s: %s\n", extension, message);
        return 1;
    }
    sqlite3_close(connection);
    return speedtest1_main(argc, argv);
}
