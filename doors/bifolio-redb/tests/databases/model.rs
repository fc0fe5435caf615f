//! A database whose commits are made of their numbers, and the same commits on a `BTreeMap`.
//!
//! The number of the last commit determines every byte, so a database can be checked after a kill
//! or a power cut.

use std::collections::BTreeMap;
use std::path::Path;

use bifolio::{Cache, File, OpenOptions};
use bifolio_redb::BifolioBackend;
use fastrand::Rng;
use redb::{
    Database, DatabaseError, ReadableDatabase, ReadableTable, ReadableTableMetadata,
    TableDefinition, WriteTransaction,
};

pub const TABLE: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("values");
const NUMBERS: TableDefinition<'_, &str, u64> = TableDefinition::new("numbers");
const KEYS: u64 = 2000;

/// The values of all keys after some commit.
pub type Model = BTreeMap<u64, Vec<u8>>;

/// A part of a commit.
enum Change {
    Put(u64, Vec<u8>),
    Remove(u64),
    RemoveRange(u64, u64),
}

pub fn cache(bytes: u64) -> Cache {
    Cache::builder().memory(bytes).build().unwrap()
}

pub fn writable() -> OpenOptions {
    OpenOptions::new().write(true)
}

/// Opens a database, with so little memory in redb itself that the cache has work.
pub fn try_open(backend: BifolioBackend) -> Result<Database, DatabaseError> {
    Database::builder().set_cache_size(256 << 10).create_with_backend(backend)
}

pub fn open(path: &Path, cache: &Cache) -> Database {
    try_open(BifolioBackend::open(path, cache).unwrap()).unwrap()
}

pub fn open_file(file: File) -> Database {
    try_open(BifolioBackend::new(file)).unwrap()
}

/// The changes of commit `number`.
fn changes(number: u64) -> Vec<Change> {
    let mut random = Rng::with_seed(number);
    let count = random.usize(1..30);
    (0..count)
        .map(|_| match random.u32(0..20) {
            0 => {
                let first = random.u64(0..KEYS);
                Change::RemoveRange(first, first + random.u64(1..40))
            }
            1..5 => Change::Remove(random.u64(0..KEYS)),
            kind => {
                let longest = if kind == 19 { 30_000 } else { 1500 };
                Change::Put(random.u64(0..KEYS), bytes(&mut random, longest))
            }
        })
        .collect()
}

fn bytes(random: &mut Rng, longest: usize) -> Vec<u8> {
    let mut bytes = vec![0; random.usize(0..longest)];
    random.fill(&mut bytes);
    bytes
}

/// Makes the changes of commit `number` in `transaction`.
pub fn write(transaction: &WriteTransaction, number: u64) -> Result<(), redb::Error> {
    let mut table = transaction.open_table(TABLE)?;
    for change in changes(number) {
        match change {
            Change::Put(key, value) => drop(table.insert(key, value.as_slice())?),
            Change::Remove(key) => drop(table.remove(key)?),
            Change::RemoveRange(first, end) => table.retain_in(first..end, |_, _| false)?,
        }
    }
    transaction.open_table(NUMBERS)?.insert("last", number)?;
    Ok(())
}

pub fn commit(database: &Database, number: u64) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    write(&transaction, number)?;
    Ok(transaction.commit()?)
}

/// Makes the changes of commit `number` in `model`.
pub fn write_model(model: &mut Model, number: u64) {
    for change in changes(number) {
        match change {
            Change::Put(key, value) => drop(model.insert(key, value)),
            Change::Remove(key) => drop(model.remove(&key)),
            Change::RemoveRange(first, end) => model.retain(|key, _| !(first..end).contains(key)),
        }
    }
}

/// The model after the commits up to `last`.
pub fn model(last: u64) -> Model {
    let mut model = Model::new();
    (1..=last).for_each(|number| write_model(&mut model, number));
    model
}

/// The number of the last commit that the database has.
pub fn last_commit(database: &Database) -> u64 {
    let transaction = database.begin_read().unwrap();
    match transaction.open_table(NUMBERS) {
        Ok(table) => table.get("last").unwrap().map_or(0, |number| number.value()),
        Err(redb::TableError::TableDoesNotExist(_)) => 0,
        Err(error) => panic!("{error}"),
    }
}

/// Compares all keys, in order, and some single keys and ranges.
pub fn assert_holds(database: &Database, model: &Model) {
    let transaction = database.begin_read().unwrap();
    let table = match transaction.open_table(TABLE) {
        Ok(table) => table,
        Err(redb::TableError::TableDoesNotExist(_)) => return assert!(model.is_empty()),
        Err(error) => panic!("{error}"),
    };
    assert_eq!(table.len().unwrap(), model.len() as u64);
    let mut expected = model.iter();
    for entry in table.iter().unwrap() {
        let (key, value) = entry.unwrap();
        let (expected_key, expected_value) = expected.next().unwrap();
        assert_eq!(key.value(), *expected_key);
        assert!(value.value() == expected_value.as_slice(), "the value of {expected_key}");
    }
    for key in (0..KEYS).step_by(97) {
        let found = table.get(key).unwrap();
        assert_eq!(found.map(|value| value.value().to_vec()).as_ref(), model.get(&key), "{key}");
        let found = table.range(key..key + 50).unwrap().rev();
        let keys: Vec<u64> = found.map(|entry| entry.unwrap().0.value()).collect();
        let expected: Vec<u64> = model.range(key..key + 50).rev().map(|(key, _)| *key).collect();
        assert_eq!(keys, expected);
    }
}

/// Judges a database that was found after a crash: it is sound, has every acknowledged commit, and
/// exactly the bytes of its last one. Returns the number of that.
pub fn assert_recovered(database: &mut Database, acknowledged: u64) -> u64 {
    assert!(database.check_integrity().unwrap(), "redb repaired what it had accepted");
    let last = last_commit(database);
    assert!(last >= acknowledged, "commit {acknowledged} was acknowledged, the last is {last}");
    assert_holds(database, &model(last));
    last
}

#[test]
fn commits_and_aborts_follow_the_model_across_reopens() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.redb");
    let cache = cache(1 << 20);
    let mut model = Model::new();
    let mut random = Rng::with_seed(7);
    let mut database = open(&path, &cache);
    for number in 1..=300 {
        if random.u32(0..4) == 0 {
            let transaction = database.begin_write().unwrap();
            write(&transaction, 1_000_000 + number).unwrap();
            transaction.abort().unwrap();
        }
        let mut transaction = database.begin_write().unwrap();
        if random.bool() {
            transaction.set_durability(redb::Durability::None).unwrap();
        }
        write(&transaction, number).unwrap();
        transaction.commit().unwrap();
        write_model(&mut model, number);
        if number % 30 == 0 {
            assert_holds(&database, &model);
            drop(database);
            database = open(&path, &cache);
            assert_holds(&database, &model);
        }
    }
    assert!(database.check_integrity().unwrap());
    drop(database);
    // Another cache has nothing but what is on the disk; so has redb's own backend.
    assert_holds(&open(&path, &self::cache(64 << 20)), &model);
    assert_holds(&Database::open(&path).unwrap(), &model);
}
