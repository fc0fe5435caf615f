//! Loads and stores of whole maps.
//!
//! # Safety
//! Copies between a map and memory of the test, inside the map. The runner's model guarantees that
//! no other thread uses these bytes of the file now, and that the file is at least that long.
#![allow(unsafe_code)]

use std::ptr;

use bifolio::{Map, MapMut};

/// The bytes of a map.
pub(crate) fn load(map: &Map) -> Vec<u8> {
    let mut found = vec![0xEE; map.len() as usize];
    // SAFETY: both are as long as the map and do not overlap; see the head of the file.
    unsafe { ptr::copy_nonoverlapping(map.as_ptr(), found.as_mut_ptr(), found.len()) };
    found
}

/// Stores to all bytes of a map.
pub(crate) fn store(map: &mut MapMut, bytes: &[u8]) {
    assert_eq!(bytes.len() as u64, map.len());
    // SAFETY: both are as long as the map and do not overlap; see the head of the file.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), map.as_mut_ptr(), bytes.len()) };
}
