//! Calls whose buffers are in maps: a page that a call touches while it holds a folio's lock must
//! not be one that waits for a folio's lock.
//!
//! # Safety
//! No other code uses the maps meanwhile.
#![allow(unsafe_code)]

use crate::setup::{Way, load};
use bifolio::ReadRequest;

const PAGE: u64 = 4096;
const PAGES: u64 = 64;

/// Returns bytes that identify the page they were first written to.
fn page_of(index: u64) -> Vec<u8> {
    vec![index as u8 + 1; PAGE as usize]
}

#[test]
fn a_page_can_be_written_from_the_map_of_itself_and_of_others() {
    for way in Way::whole() {
        let cache = way.swapping(4 << 20);
        let file = way.memory_file(&cache, 2 * PAGES * PAGE);
        let map = file.map(0..2 * PAGES * PAGE).unwrap();
        for index in 0..PAGES {
            file.write_all_at(&page_of(index), index * PAGE).unwrap();
        }
        // SAFETY: see the head of the file.
        let bytes = unsafe { map.as_slice() };
        // A hole that is written from itself, whole: no page of it is resident.
        let hole = (PAGES + 5) * PAGE;
        file.write_all_at(&bytes[hole as usize..(hole + PAGE) as usize], hole).unwrap();
        assert!(load(map.as_ptr(), hole..hole + PAGE).iter().all(|byte| *byte == 0));
        // All of them from others, which are at odd places.
        file.write_all_at(&bytes[100..(PAGES * PAGE) as usize - 100], PAGES * PAGE).unwrap();
        let copied = load(map.as_ptr(), PAGES * PAGE..2 * PAGES * PAGE - 200);
        let expected: Vec<u8> = (0..PAGES).flat_map(page_of).skip(100).collect();
        assert_eq!(copied, expected[..copied.len()], "{way:?}");
    }
}

#[test]
fn a_page_can_be_read_into_the_map_of_itself_and_of_others() {
    for way in Way::whole() {
        let cache = way.swapping(4 << 20);
        let file = way.memory_file(&cache, 4 * PAGES * PAGE);
        for index in 0..PAGES {
            file.write_all_at(&page_of(index), index * PAGE).unwrap();
        }
        let mut map = file.map_mut(0..4 * PAGES * PAGE).unwrap();
        // SAFETY: see the head of the file.
        let bytes = unsafe { map.as_mut_slice() };
        let (source, rest) = bytes.split_at_mut((PAGES * PAGE) as usize);
        let (target, many) = rest.split_at_mut((PAGES * PAGE) as usize);
        file.read_exact_at(target, 0).unwrap();
        let mut requests: Vec<_> = many
            .chunks_mut(3 * PAGE as usize)
            .take(PAGES as usize / 3)
            .enumerate()
            .map(|(number, chunk)| ReadRequest::new(chunk, number as u64 * 3 * PAGE))
            .collect();
        file.read_many(&mut requests).unwrap();
        assert!(requests.iter().all(|request| request.result.is_ok()));
        drop(requests);
        let expected: Vec<u8> = (0..PAGES).flat_map(page_of).collect();
        assert_eq!(source, expected);
        assert_eq!(target, expected, "{way:?}");
        let whole = PAGES as usize / 3 * 3 * PAGE as usize;
        assert_eq!(many[..whole], expected[..whole], "{way:?}");
    }
}

#[test]
fn a_swapped_page_can_be_read_into_its_own_place() {
    for way in Way::whole() {
        let cache = way.swapping(4 << 20);
        let file = way.memory_file(&cache, 32 * PAGES * PAGE);
        let mut map = file.map_mut(0..32 * PAGES * PAGE).unwrap();
        for index in 0..32 * PAGES {
            file.write_all_at(&page_of(index % PAGES), index * PAGE).unwrap();
        }
        assert!(cache.stats().storage.swapped_out_pages > PAGES);
        for index in 0..PAGES {
            let place = (index * PAGE) as usize..((index + 1) * PAGE) as usize;
            // SAFETY: see the head of the file.
            let own = unsafe { map.as_mut_slice() };
            file.read_exact_at(&mut own[place.clone()], index * PAGE).unwrap();
            assert_eq!(own[place], page_of(index), "{way:?}");
        }
    }
}
