//! The table that is measured: its rows, and the file that holds them at first.
//!
//! Row `n` has the key `n * MULTIPLIER`, so rows that are added later have keys between those of
//! earlier rows.

use std::path::Path;

use redb::{Database, Durability, TableDefinition};

use crate::values::{forget, value};

pub(super) const TABLE: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("rows");
/// Bytes of the file for each row that is inserted in the order of keys: row, offsets, and what
/// stays free in the pages.
const ROW_BYTES: u64 = 180;
/// Odd, so that different rows have different keys.
const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
const BUILD_CACHE_BYTES: usize = 256 << 20;

/// The key of a row.
pub(super) fn key(row: u64) -> u64 {
    row.wrapping_mul(MULTIPLIER)
}

/// How many rows make a file of this size.
pub(super) fn rows(size_bytes: u64) -> u64 {
    size_bytes / ROW_BYTES
}

/// Makes a database of `rows` rows. Nothing of it stays in the page cache.
pub(super) fn build(path: &Path, rows: u64) -> anyhow::Result<()> {
    let database = Database::builder().set_cache_size(BUILD_CACHE_BYTES).create(path)?;
    let mut keys: Vec<u64> = (0..rows).map(key).collect();
    keys.sort_unstable();
    for keys in keys.chunks(200_000) {
        let mut transaction = database.begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        let mut table = transaction.open_table(TABLE)?;
        for key in keys {
            table.insert(key, value(*key, 0).as_slice())?;
        }
        drop(table);
        transaction.commit()?;
    }
    drop(database);
    forget(path)
}
