//! Pages that the kernel does not unmap: those the program has locked.
//!
//! # Safety
//! Locks pages of a map, which changes nothing that Rust knows of.
#![allow(unsafe_code)]

use crate::setup::{Way, word};
use rustix::mm::MlockFlags;
use std::sync::atomic::Ordering;

const PAGES: u64 = 2048;
const PAGE: u64 = 4096;

/// A batch of pages in a row, of which the kernel unmaps the first and refuses one in the middle.
#[test]
fn a_batch_that_is_unmapped_in_part_loses_no_store() {
    for way in Way::modes() {
        let cache = way.spilling(4 << 20);
        let file = way.memory_file(&cache, PAGES * PAGE);
        let mut map = file.map_mut(0..PAGES * PAGE).unwrap();
        let start = map.as_mut_ptr();
        // Every 40th page: in most batches there is one, and it is not the first.
        for page in (20..400).step_by(40) {
            let address = start.wrapping_add((page * PAGE) as usize).cast();
            // SAFETY: a page of the map.
            unsafe { rustix::mm::mlock_with(address, PAGE as usize, MlockFlags::ONFAULT) }.unwrap();
        }
        for round in 1..4 {
            for page in 0..PAGES {
                let word = word(start, page * PAGE);
                let expected = if round == 1 { 0 } else { page * 10 + round - 1 };
                let found = word.swap(page * 10 + round, Ordering::Relaxed);
                assert_eq!(found, expected, "page {page} in round {round}, {way:?}");
            }
        }
        assert!(cache.stats().unmapped_pages > PAGES, "{:?}", cache.stats());
    }
}
