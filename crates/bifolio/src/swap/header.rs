//! The header of a swap file: the first page, by which a later run knows the file for its own.
//!
//! ```text
//!   0                    16           20                          4092        4096
//!  +--------------------+------------+---------------------------+-----------+
//!  |  magic             |  version   |  zeros                    |  CRC-32   |   little-endian
//!  +--------------------+------------+---------------------------+-----------+
//! ```
//!
//! It says nothing about the rest of the file, which is of use only to the cache that wrote it.

use super::PAGE_BYTES;
use crate::error::SwapFileProblem;

const MAGIC: [u8; 16] = *b"bifolio spill\r\n\0";
const VERSION: u32 = 1;
const VERSION_START: usize = MAGIC.len();
const CHECKSUM_START: usize = PAGE_BYTES - size_of::<u32>();

/// The header that is written to an empty file.
pub(super) fn header() -> [u8; PAGE_BYTES] {
    header_of(VERSION)
}

/// Whether a file that begins like this may be used, and overwritten.
pub(super) fn check(bytes: &[u8; PAGE_BYTES]) -> Result<(), SwapFileProblem> {
    let field = |start: usize| {
        let field = bytes[start..].first_chunk().expect("a field ends inside the header");
        u32::from_le_bytes(*field)
    };
    let is_ours = bytes.starts_with(&MAGIC);
    if !is_ours || field(CHECKSUM_START) != crc32fast::hash(&bytes[..CHECKSUM_START]) {
        return Err(SwapFileProblem::Foreign);
    }
    match field(VERSION_START) {
        VERSION => Ok(()),
        found => Err(SwapFileProblem::OtherVersion { found, expected: VERSION }),
    }
}

fn header_of(version: u32) -> [u8; PAGE_BYTES] {
    let mut bytes = [0; PAGE_BYTES];
    bytes[..VERSION_START].copy_from_slice(&MAGIC);
    bytes[VERSION_START..][..size_of::<u32>()].copy_from_slice(&version.to_le_bytes());
    let checksum = crc32fast::hash(&bytes[..CHECKSUM_START]);
    bytes[CHECKSUM_START..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_known_again_and_every_changed_byte_is_noticed() {
        assert!(check(&header()).is_ok());
        for at in 0..PAGE_BYTES {
            let mut changed = header();
            changed[at] ^= 1;
            assert!(matches!(check(&changed), Err(SwapFileProblem::Foreign)), "byte {at}");
        }
        assert!(matches!(check(&[0; PAGE_BYTES]), Err(SwapFileProblem::Foreign)));
        // Another program may sum up its pages in the same place.
        let mut foreign = [7; PAGE_BYTES];
        let checksum = crc32fast::hash(&foreign[..CHECKSUM_START]);
        foreign[CHECKSUM_START..].copy_from_slice(&checksum.to_le_bytes());
        assert!(matches!(check(&foreign), Err(SwapFileProblem::Foreign)));
    }

    #[test]
    fn the_format_of_another_version_is_refused_by_its_number() {
        let problem = check(&header_of(7)).unwrap_err();
        assert!(matches!(problem, SwapFileProblem::OtherVersion { found: 7, expected: VERSION }));
    }

    #[test]
    fn the_format_stays_what_it_was() {
        let header = header();
        assert_eq!(header[..20], *b"bifolio spill\r\n\0\x01\0\0\0");
        assert_eq!(header[20..CHECKSUM_START], [0; CHECKSUM_START - 20]);
    }
}
