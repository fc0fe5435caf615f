//! The table that is measured: its rows, and the file that holds them at first.
//!
//! Row `n` has the key `n * MULTIPLIER`, so rows that are added later have keys between those of
//! earlier rows. A value names its key and the number of its last change, and the rest follows
//! from these: every value that is read is checked.

use std::fs::File;
use std::path::Path;

use redb::{Database, Durability, TableDefinition};

pub(super) const TABLE: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("rows");
pub(super) const VALUE_BYTES: usize = 150;
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

/// The value of `key` after the change with this number.
pub(super) fn value(key: u64, change: u64) -> [u8; VALUE_BYTES] {
    let mut value = [0; VALUE_BYTES];
    for (at, word) in value.chunks_mut(8).enumerate() {
        let number = if at == 0 { change } else { (key ^ change).wrapping_add(at as u64) };
        word.copy_from_slice(&number.to_le_bytes()[..word.len()]);
    }
    value
}

/// Returns `true` if `found` is a value that `key` had at some time.
pub(super) fn is_value_of(key: u64, found: &[u8]) -> bool {
    let Some(change) = found.first_chunk() else { return false };
    found == value(key, u64::from_le_bytes(*change))
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

/// Copies a database for another series.
pub(super) fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    std::fs::copy(from, to)?;
    forget(from)?;
    forget(to)
}

/// Drops the file from the page cache: pages are charged to the group that reads them first.
fn forget(path: &Path) -> anyhow::Result<()> {
    let file = File::open(path)?;
    file.sync_all()?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_belongs_to_its_key_only() {
        let value = value(key(7), 3);
        assert!(is_value_of(key(7), &value));
        assert!(!is_value_of(key(8), &value));
        assert!(!is_value_of(key(7), &value[1..]));
    }
}
