//! The codec of some files: each word is changed by a key of its position.
//!
//! A word of zeros was never sealed. So a page that is visible without `check`, or written without
//! `seal`, or with either twice, has words that no change wrote.

use bifolio::PageCodec;
use std::io;

/// Changes words by keys; its own inverse.
#[derive(Debug)]
pub struct WordKeys;

fn key(position: u64) -> u64 {
    (position / 8 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1
}

fn change(position: u64, bytes: &mut [u8], is_changed: impl Fn(u64) -> bool) {
    for (number, word) in bytes.chunks_exact_mut(8).enumerate() {
        let bytes: [u8; 8] = (&*word).try_into().unwrap_or_default();
        let value = u64::from_le_bytes(bytes);
        if is_changed(value) {
            let changed = value ^ key(position + number as u64 * 8);
            word.copy_from_slice(&changed.to_le_bytes());
        }
    }
}

/// Returns what sealed bytes (whole words) are in memory.
pub fn opened(position: u64, mut bytes: Vec<u8>) -> Vec<u8> {
    change(position, &mut bytes, |word| word != 0);
    bytes
}

impl PageCodec for WordKeys {
    fn check(&self, position: u64, page: &mut [u8]) -> io::Result<()> {
        change(position, page, |word| word != 0);
        Ok(())
    }

    fn seal(&self, position: u64, page: &mut [u8]) -> io::Result<()> {
        change(position, page, |_| true);
        Ok(())
    }
}
