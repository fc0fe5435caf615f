//! A static B+-tree of 64-bit keys and values in pages of 4 KiB, built bottom-up, and the search in
//! one of its pages. Every series searches with the same code; they differ in where pages are.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::values::forget;

pub(super) const PAGE_BYTES: usize = 4096;
/// A page begins with the number of its entries; pairs of a key and a value, or a page, follow.
const HEAD_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
pub(super) const ENTRIES_MAX: u64 = ((PAGE_BYTES - HEAD_BYTES) / ENTRY_BYTES) as u64;
/// Distance of adjacent keys.
const KEY_STEP: u64 = 3;

/// Shape of a tree, which is all that a search needs besides the pages.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Tree {
    pub(super) rows: u64,
    pub(super) root: u64,
    /// Pages from the root to a leaf.
    pub(super) levels: u32,
}

/// The key of a row.
pub(super) fn key(row: u64) -> u64 {
    row * KEY_STEP + 1
}

/// The value of a key.
pub(super) fn value(key: u64) -> u64 {
    key.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

/// Number of rows in a tree of at most `size_bytes`.
pub(super) fn rows(size_bytes: u64) -> u64 {
    // One page in 256 is above the leaves.
    let pages = size_bytes / PAGE_BYTES as u64;
    (pages - pages.div_ceil(ENTRIES_MAX) - 1).max(1) * ENTRIES_MAX
}

/// Writes a tree of `rows` rows, full pages from left to right. Nothing of it stays in the kernel's
/// page cache.
pub(super) fn build(path: &Path, rows: u64) -> anyhow::Result<Tree> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut entries: Vec<(u64, u64)> = Vec::new();
    let (mut levels, mut pages, mut above) = (1, 0, Vec::new());
    let mut put = |entries: &[(u64, u64)], above: &mut Vec<(u64, u64)>| -> anyhow::Result<()> {
        let mut page = [0; PAGE_BYTES];
        page[..8].copy_from_slice(&(entries.len() as u64).to_le_bytes());
        for (place, (key, value)) in page[HEAD_BYTES..].chunks_exact_mut(ENTRY_BYTES).zip(entries) {
            place[..8].copy_from_slice(&key.to_le_bytes());
            place[8..].copy_from_slice(&value.to_le_bytes());
        }
        file.write_all(&page)?;
        above.push((entries[0].0, pages));
        pages += 1;
        Ok(())
    };
    for row in 0..rows {
        entries.push((key(row), value(key(row))));
        if entries.len() as u64 == ENTRIES_MAX || row + 1 == rows {
            put(&entries, &mut above)?;
            entries.clear();
        }
    }
    while above.len() > 1 {
        levels += 1;
        let below = std::mem::take(&mut above);
        below.chunks(ENTRIES_MAX as usize).try_for_each(|entries| put(entries, &mut above))?;
    }
    file.into_inner()?.sync_all()?;
    forget(path)?;
    Ok(Tree { rows, root: pages - 1, levels })
}

/// Searches a page for the last entry whose key is at most `key`. `word` returns the eight bytes at
/// an offset, as a little-endian number.
#[inline(always)]
pub(super) fn search(key: u64, word: impl Fn(usize) -> u64) -> (u64, u64) {
    let place = |entry: u64| HEAD_BYTES + entry as usize * ENTRY_BYTES;
    // A page that changes while it is read may have any count: what is found then is discarded.
    let (mut low, mut high) = (0, word(0).min(ENTRIES_MAX));
    while high - low > 1 {
        let middle = u64::midpoint(low, high);
        if word(place(middle)) <= key { low = middle } else { high = middle }
    }
    (word(place(low)), word(place(low) + 8))
}

/// The word at an offset of bytes that do not change.
#[inline(always)]
pub(super) fn word_of(page: &[u8; PAGE_BYTES], offset: usize) -> u64 {
    u64::from_le_bytes(page[offset..offset + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_found_and_no_other_key() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tree");
        for rows in [1, 2, ENTRIES_MAX, ENTRIES_MAX + 1, ENTRIES_MAX * ENTRIES_MAX + 7] {
            let tree = build(&path, rows).unwrap();
            let bytes = std::fs::read(&path).unwrap();
            let find = |key: u64| {
                let mut page = tree.root;
                for level in (0..tree.levels).rev() {
                    let start = page as usize * PAGE_BYTES;
                    let bytes = bytes[start..start + PAGE_BYTES].try_into().unwrap();
                    let (found, next) = search(key, |offset| word_of(bytes, offset));
                    if level == 0 {
                        return (found == key).then_some(next);
                    }
                    page = next;
                }
                None
            };
            for row in (0..rows).step_by(1 + rows as usize / 1000).chain([rows - 1]) {
                assert_eq!(find(key(row)), Some(value(key(row))), "row {row} of {rows}");
                assert_eq!(find(key(row) + 1), None);
            }
        }
    }

    #[test]
    fn a_tree_is_as_large_as_was_asked() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tree");
        for size_bytes in [64 << 10, 4 << 20] {
            build(&path, rows(size_bytes)).unwrap();
            let length = std::fs::metadata(&path).unwrap().len();
            assert!(length <= size_bytes && length * 20 > size_bytes * 17, "{length} {size_bytes}");
        }
    }
}
