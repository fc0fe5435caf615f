//! Workloads of redb: savepoints, compaction, large values, readers beside a writer,
//! tables with several values for a key.

use bifolio_redb::BifolioBackend;
use redb::{
    Builder, Database, MultimapTableDefinition, ReadOnlyDatabase, ReadableDatabase, ReadableTable,
    ReadableTableMetadata,
};

use super::model::{
    TABLE, assert_holds, cache, commit, model, open, open_file, try_open, writable, write,
};

#[test]
fn savepoints_restore_the_earlier_contents() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("savepoints.redb");
    let cache = cache(1 << 20);
    let database = open(&path, &cache);
    (1..=40).for_each(|number| commit(&database, number).unwrap());
    let transaction = database.begin_write().unwrap();
    let persistent = transaction.persistent_savepoint().unwrap();
    transaction.commit().unwrap();
    (41..=80).for_each(|number| commit(&database, number).unwrap());
    let transaction = database.begin_write().unwrap();
    let ephemeral = transaction.ephemeral_savepoint().unwrap();
    transaction.commit().unwrap();
    (81..=120).for_each(|number| commit(&database, number).unwrap());
    assert_holds(&database, &model(120));

    let mut transaction = database.begin_write().unwrap();
    transaction.restore_savepoint(&ephemeral).unwrap();
    transaction.commit().unwrap();
    assert_holds(&database, &model(80));
    drop((ephemeral, database));

    let mut database = open(&path, &cache);
    let mut transaction = database.begin_write().unwrap();
    let savepoint = transaction.get_persistent_savepoint(persistent).unwrap();
    transaction.restore_savepoint(&savepoint).unwrap();
    transaction.delete_persistent_savepoint(persistent).unwrap();
    transaction.commit().unwrap();
    assert_holds(&database, &model(40));
    assert!(database.check_integrity().unwrap());
}

#[test]
fn compaction_shortens_the_file_and_keeps_the_rest() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("compacted.redb");
    let cache = cache(1 << 20);
    let mut database = open(&path, &cache);
    (1..=60).for_each(|number| commit(&database, number).unwrap());
    let filler = vec![5; 100_000];
    let transaction = database.begin_write().unwrap();
    for key in 0..100 {
        transaction.open_table(TABLE).unwrap().insert(1_000_000 + key, &filler[..]).unwrap();
    }
    transaction.commit().unwrap();
    let transaction = database.begin_write().unwrap();
    transaction.open_table(TABLE).unwrap().retain(|key, _| key < 1_000_000).unwrap();
    transaction.commit().unwrap();
    let long = std::fs::metadata(&path).unwrap().len();
    assert!(database.compact().unwrap());
    let short = std::fs::metadata(&path).unwrap().len();
    assert!(short < long, "{short} after {long}");
    assert_holds(&database, &model(60));
    assert!(database.check_integrity().unwrap());
    drop(database);
    assert_holds(&Database::open(&path).unwrap(), &model(60));
}

#[test]
fn values_longer_than_the_cache_are_stored_and_read() {
    let directory = tempfile::tempdir().unwrap();
    let cache = cache(1 << 20);
    let database = open(&directory.path().join("long.redb"), &cache);
    let long: Vec<u8> = (0..5 << 20).map(|at| (at / 7) as u8).collect();
    let transaction = database.begin_write().unwrap();
    transaction.open_table(TABLE).unwrap().insert(1, &long[..]).unwrap();
    transaction.commit().unwrap();
    let transaction = database.begin_read().unwrap();
    let table = transaction.open_table(TABLE).unwrap();
    assert!(table.get(1).unwrap().unwrap().value() == long);
    assert!(cache.stats().memory.used_bytes <= 1 << 20);
}

#[test]
fn readers_keep_their_snapshot_beside_a_writer() {
    let directory = tempfile::tempdir().unwrap();
    let cache = cache(1 << 20);
    let database = open(&directory.path().join("snapshots.redb"), &cache);
    (1..=50).for_each(|number| commit(&database, number).unwrap());
    let snapshot = database.begin_read().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| (51..=150).for_each(|number| commit(&database, number).unwrap()));
        for _ in 0..2 {
            scope.spawn(|| {
                let (table, expected) = (snapshot.open_table(TABLE).unwrap(), model(50));
                for _ in 0..20 {
                    let found = table.iter().unwrap().map(|entry| entry.unwrap());
                    let same = found
                        .zip(&expected)
                        .filter(|(found, expected)| {
                            found.0.value() == *expected.0 && found.1.value() == *expected.1
                        })
                        .count();
                    assert_eq!((same, table.len().unwrap()), (expected.len(), same as u64));
                }
            });
        }
    });
    assert_holds(&database, &model(150));
}

#[test]
fn multimap_tables_work() {
    let table = MultimapTableDefinition::<u64, u64>::new("pairs");
    let cache = cache(1 << 20);
    let database = open_file(cache.memory_file("pairs").unwrap());
    let transaction = database.begin_write().unwrap();
    {
        let mut table = transaction.open_multimap_table(table).unwrap();
        for pair in 0..10_000 {
            table.insert(pair % 10, pair).unwrap();
        }
        table.remove_all(3).unwrap();
    }
    transaction.commit().unwrap();
    let transaction = database.begin_read().unwrap();
    let table = transaction.open_multimap_table(table).unwrap();
    let values = table.get(7).unwrap().map(|value| value.unwrap().value());
    assert!(values.eq((7..10_000).step_by(10)));
    assert_eq!(table.get(3).unwrap().count(), 0);
}

#[test]
fn a_file_of_other_options_or_in_memory_holds_a_database() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("folios.redb");
    let cache = cache(4 << 20);
    let options = writable().create(true).exclusive(true).folio_bytes(64 << 10).len_max(64 << 20);
    let files = [cache.open(&path, &options).unwrap(), cache.memory_file("scratch").unwrap()];
    for file in files {
        let mut database = open_file(file);
        (1..=60).for_each(|number| commit(&database, number).unwrap());
        assert_holds(&database, &model(60));
        assert!(database.check_integrity().unwrap());
    }
}

#[test]
fn a_read_only_database_reads_and_excludes_writers() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("read_only.redb");
    let cache = cache(1 << 20);
    let database = open(&path, &cache);
    commit(&database, 1).unwrap();
    drop(database);
    let backend = BifolioBackend::open(&path, &cache).unwrap();
    let Ok(database): Result<ReadOnlyDatabase, _> =
        Builder::new().open_read_only_with_backend(backend)
    else {
        panic!("cannot be opened for reading");
    };
    let transaction = database.begin_read().unwrap();
    assert_eq!(transaction.open_table(TABLE).unwrap().len().unwrap(), model(1).len() as u64);
    let second = try_open(BifolioBackend::open(&path, &cache).unwrap());
    assert!(matches!(second, Err(redb::DatabaseError::DatabaseAlreadyOpen)));
    drop((transaction, database));
    assert_holds(&open(&path, &cache), &model(1));
}

#[test]
fn an_uncommitted_transaction_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("uncommitted.redb");
    let cache = cache(1 << 20);
    let database = open(&path, &cache);
    commit(&database, 1).unwrap();
    let transaction = database.begin_write().unwrap();
    (2..=200).for_each(|number| write(&transaction, number).unwrap());
    drop(transaction);
    drop(database);
    let mut database = open(&path, &cache);
    assert!(database.check_integrity().unwrap());
    assert_holds(&database, &model(1));
}
