//! A database file is open once: in a cache, beside other caches, and beside redb's own backend.

use std::io::ErrorKind;

use bifolio_redb::BifolioBackend;
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTableMetadata};

use super::model::{TABLE, assert_holds, cache, commit, model, open, try_open};

#[test]
fn a_second_database_in_the_same_cache_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("locked.redb");
    let other_name = directory.path().join("other_name.redb");
    let cache = cache(1 << 20);
    let database = open(&path, &cache);
    commit(&database, 1).unwrap();
    std::fs::hard_link(&path, &other_name).unwrap();
    for name in [&path, &other_name] {
        let second = try_open(BifolioBackend::open(name, &cache).unwrap());
        assert!(matches!(second, Err(DatabaseError::DatabaseAlreadyOpen)));
    }
    // The refused ones have not unlocked the first.
    let third = try_open(BifolioBackend::open(&path, &cache).unwrap());
    assert!(matches!(third, Err(DatabaseError::DatabaseAlreadyOpen)));
    commit(&database, 2).unwrap();
    drop(database);
    assert_holds(&open(&other_name, &cache), &model(2));
}

#[test]
fn other_caches_and_redb_itself_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("locked.redb");
    let (here, there) = (cache(1 << 20), cache(1 << 20));
    let database = open(&path, &here);
    commit(&database, 1).unwrap();
    let refused = BifolioBackend::open(&path, &there).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ResourceBusy, "{refused}");
    assert!(refused.to_string().contains("locked.redb"), "{refused}");
    assert!(matches!(Database::open(&path), Err(DatabaseError::DatabaseAlreadyOpen)));
    drop(database);
    let database = Database::open(&path).unwrap();
    let refused = BifolioBackend::open(&path, &there).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ResourceBusy, "{refused}");
    drop(database);
    assert_holds(&open(&path, &there), &model(1));
}

#[test]
fn a_closed_database_is_unlocked_although_a_reader_lives() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("readers.redb");
    let cache = cache(1 << 20);
    let database = open(&path, &cache);
    commit(&database, 1).unwrap();
    let transaction = database.begin_read().unwrap();
    let table = transaction.open_table(TABLE).unwrap();
    drop(database);
    // redb may answer from its own cache, or refuse; the backend is not used any more.
    let _ = table.len();
    assert_holds(&open(&path, &self::cache(1 << 20)), &model(1));
}
