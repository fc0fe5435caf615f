//! Pools of connections that scan, by the requests that the cache makes of the device.

use std::path::Path;
use std::thread;

use crate::library::{Connection, Library};

const ROWS: u32 = 40_000;
const ROW_BYTES: u32 = 4000;

fn count(connection: &Connection, name: &str) -> u64 {
    let stats = connection.ask("pragma bifolio_stats");
    let line = stats.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.map_or(0, |number| number.parse().unwrap())
}

/// Returns the bytes of a request while each of several connections scans the table.
fn request_bytes(library: Library, path: &Path, connections: usize) -> u64 {
    let open = || library.open_cached(path, "bifolio_memory=64MiB").unwrap();
    let observer = open();
    thread::scope(|scope| {
        for connection in (0..connections).map(|_| open()) {
            scope.spawn(move || {
                connection.run("pragma cache_size=10").unwrap();
                let sum = connection.ask("select sum(length(v)) from t");
                assert_eq!(sum, (ROWS * ROW_BYTES).to_string());
            });
        }
    });
    let [bytes, requests] =
        ["storage_read_bytes", "storage_read_requests"].map(|name| count(&observer, name));
    println!("{connections} scans: {bytes} bytes in {requests} requests");
    bytes / requests
}

/// A connection that overtakes another continues its readahead. Usually they are above half of one
/// scan's requests; a slow machine evicts some pages before the last connection has come to them.
#[test]
fn a_pool_of_scans_reads_as_far_ahead_as_one() {
    let Some(library) = Library::load() else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.db");
    let sql = format!(
        "create table t(v);
         with recursive i(n) as (select 1 union all select n+1 from i where n<{ROWS})
             insert into t select randomblob({ROW_BYTES}) from i"
    );
    library.open_cached(&path, "").unwrap().run(&sql).unwrap();
    let alone = request_bytes(library, &path, 1);
    let measured =
        [4, 8, 16].map(|connections| (connections, request_bytes(library, &path, connections)));
    for (connections, each) in measured {
        assert!(4 * each >= alone, "{connections} scans: {each} bytes a request, one: {alone}");
    }
}
