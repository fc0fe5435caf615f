//! Several databases in one cache, and a cache that is closed under a database.

use redb::Database;

use super::model::{
    Model, assert_holds, assert_recovered, cache, commit, last_commit, model, open, write_model,
};

#[test]
fn two_databases_share_a_cache_of_one_mebibyte() {
    let directory = tempfile::tempdir().unwrap();
    let cache = cache(1 << 20);
    let names = ["one.redb", "two.redb"];
    std::thread::scope(|scope| {
        for (part, name) in names.iter().enumerate() {
            let path = directory.path().join(name);
            let cache = &cache;
            scope.spawn(move || {
                let mut database = open(&path, cache);
                let mut model = Model::new();
                // Different commits, so that a page of the other file would be noticed.
                for number in (1..=150).map(|number| number * 2 + part as u64) {
                    commit(&database, number).unwrap();
                    write_model(&mut model, number);
                    if number % 20 < 2 {
                        assert_holds(&database, &model);
                    }
                }
                assert!(database.check_integrity().unwrap());
                assert_holds(&database, &model);
            });
        }
    });
    assert!(cache.stats().memory.used_bytes <= 1 << 20);
    cache.close().unwrap();
}

#[test]
fn a_cache_closed_under_a_database_gives_errors_and_no_loss() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("closed.redb");
    let cache = cache(1 << 20);
    let database = open(&path, &cache);
    (1..=50).for_each(|number| commit(&database, number).unwrap());
    cache.close().unwrap();
    let error = commit(&database, 51).unwrap_err();
    assert!(error.to_string().contains("closed"), "{error}");
    assert!(commit(&database, 52).is_err(), "and goes on failing");
    drop(database);
    let mut database = open(&path, &self::cache(1 << 20));
    assert_recovered(&mut database, 50);
}

#[test]
fn a_closed_database_leaves_nothing_dirty() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("closed.redb");
    let cache = cache(1 << 20);
    let database = open(&path, &cache);
    (1..=20).for_each(|number| commit(&database, number).unwrap());
    database.close().unwrap();
    assert_eq!(cache.stats().memory.dirty_bytes, 0);
    let database = Database::open(&path).unwrap();
    assert_eq!(last_commit(&database), 20);
    assert_holds(&database, &model(20));
}
