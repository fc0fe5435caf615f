//! Values of rows that name their key, and files that leave the kernel's page cache.
//!
//! A value has its key and the number of its last change in it, and the rest follows from these:
//! every value that is read is checked.

use std::fs::File;
use std::path::Path;

pub(crate) const VALUE_BYTES: usize = 150;

/// The value of `key` after the change with this number.
pub(crate) fn value(key: u64, change: u64) -> [u8; VALUE_BYTES] {
    let mut value = [0; VALUE_BYTES];
    for (at, word) in value.chunks_mut(8).enumerate() {
        let number = if at == 0 { change } else { (key ^ change).wrapping_add(at as u64) };
        word.copy_from_slice(&number.to_le_bytes()[..word.len()]);
    }
    value
}

/// Returns `true` if `found` is a value that `key` had at some time.
pub(crate) fn is_value_of(key: u64, found: &[u8]) -> bool {
    let Some(change) = found.first_chunk() else { return false };
    found == value(key, u64::from_le_bytes(*change))
}

/// Copies a database for another series.
pub(crate) fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    std::fs::copy(from, to)?;
    forget(from)?;
    forget(to)
}

/// Drops the file from the page cache: pages are charged to the group that reads them first.
pub(crate) fn forget(path: &Path) -> anyhow::Result<()> {
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
        let value = value(7, 3);
        assert!(is_value_of(7, &value));
        assert!(!is_value_of(8, &value));
        assert!(!is_value_of(7, &value[1..]));
    }
}
