//! Bytes of a file through a map of it.
//!
//! # Safety
//! A range is compared with the length of the map. Its bytes are copied through raw pointers, never
//! referenced, so they may change during the copy. A page that cannot be filled ends the process:
//! the caller knows that it can be filled, or checks first.
#![allow(unsafe_code)]

use bifolio::Map;

/// Prefetches a range, and copies it: a page that cannot be read is an error.
pub(super) fn copy_prefetched(map: &Map, start: u64, target: &mut [u8]) -> bifolio::Result<()> {
    map.populate(start..start + target.len() as u64)?;
    copy(map, start, target);
    Ok(())
}

/// Copies a range without a prefetch.
pub(super) fn copy(map: &Map, start: u64, target: &mut [u8]) {
    let left = map.len().checked_sub(start);
    assert!(left.is_some_and(|left| target.len() as u64 <= left), "a range of the map");
    // SAFETY: see the head of the file.
    let source = unsafe { map.as_ptr().add(start as usize) };
    // SAFETY: as above; the target is as long, and elsewhere.
    unsafe { source.copy_to_nonoverlapping(target.as_mut_ptr(), target.len()) };
}
