//! The search for data and holes of a file, in memory and on its backing.

use super::Inode;
use crate::error::Result;
use crate::page::{Entry, Folio, PAGE_BYTES, PAGE_SHIFT};
use std::ops::Range;

/// Returns the position of the first data from `position` on, before `len_bytes`.
pub(crate) fn first_data(inode: &Inode, position: u64, len_bytes: u64) -> Result<Option<u64>> {
    find_unwritten_stores(inode, &(position..len_bytes))?;
    // In this order: a folio that is written out in between is found on the backing.
    let in_memory = next_data(inode, position >> PAGE_SHIFT);
    let in_memory = in_memory.map(|index| position.max(index * PAGE_BYTES));
    let first = in_memory.into_iter().chain(inode.store.first_data(position)?).min();
    Ok(first.filter(|first| *first < len_bytes))
}

/// Returns the position of the first hole from `position` on, at most `len_bytes`.
pub(crate) fn first_hole(inode: &Inode, position: u64, len_bytes: u64) -> Result<u64> {
    find_unwritten_stores(inode, &(position..len_bytes))?;
    let mut at = position;
    while at < len_bytes {
        // In this order, as in `first_data`.
        if has_data(inode, inode.mapping.head_index(at >> PAGE_SHIFT)) {
            at = inode.mapping.end_of_unit(at >> PAGE_SHIFT) * PAGE_BYTES;
            continue;
        }
        match inode.store.first_hole(at)? {
            Some(hole) if hole > at => at = hole,
            _ => break,
        }
    }
    Ok(at.min(len_bytes))
}

/// Finds stores through maps, which make folios data of a file with a backing.
fn find_unwritten_stores(inode: &Inode, bytes: &Range<u64>) -> Result<bool> {
    if inode.device.is_some() { inode.find_stores(bytes, true) } else { Ok(false) }
}

/// Returns the first page of the first unit, from that of `index` on, whose bytes the backing
/// does not have.
fn next_data(inode: &Inode, index: u64) -> Option<u64> {
    let mut index = inode.mapping.head_index(index);
    loop {
        index = inode.mapping.head_index(inode.mapping.table().next_needed(index)?);
        if has_data(inode, index) {
            return Some(index);
        }
        index = inode.mapping.end_of_unit(index);
    }
}

/// Returns `true` if the unit whose first page is `head` has bytes that the backing does not
/// have: in a folio, or in the swap.
fn has_data(inode: &Inode, head: u64) -> bool {
    let is_data = |seen, folio: &Folio| inode.store.is_data(seen, folio);
    let found = inode.mapping.look(&inode.memory.folios, head, is_data);
    found.unwrap_or_else(|seen| inode.store.slots().is_some() && seen != Entry::HOLE)
}
