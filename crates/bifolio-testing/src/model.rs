//! What a file should hold, as a plain vector.
//!
//! A model answers for a whole file that it alone changes ([`Model::new`]), or for one region of a
//! file whose other regions belong to other threads and whose length nobody changes
//! ([`Model::region`]). Neighbouring regions may share a folio: that is the point of them.

use std::ops::Range;

use crate::memory::write_vector;

/// What a file, or a region of it, should hold.
#[derive(Clone, Debug)]
pub struct Model {
    start_bytes: u64,
    bytes: Vec<u8>,
    is_region: bool,
}

impl Model {
    /// The model of a file that holds `bytes`.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { start_bytes: 0, bytes, is_region: false }
    }

    /// The model of `bytes` at `start_bytes` of a file that others use too.
    ///
    /// # Panics
    /// If there are none.
    pub fn region(start_bytes: u64, bytes: Vec<u8>) -> Self {
        assert!(!bytes.is_empty(), "a region has bytes");
        Self { start_bytes, bytes, is_region: true }
    }

    /// What it should hold.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Where the region begins; 0 for a whole file.
    pub fn start_bytes(&self) -> u64 {
        self.start_bytes
    }

    /// Where the region, or the file, ends.
    pub fn end_bytes(&self) -> u64 {
        self.start_bytes + self.bytes.len() as u64
    }

    /// Whether others use the file too.
    pub fn is_region(&self) -> bool {
        self.is_region
    }

    /// What a read of a range of the file should give; less than asked at the end.
    pub fn read(&self, range: Range<u64>) -> &[u8] {
        let index = |position: u64| {
            let offset = position.checked_sub(self.start_bytes).expect("a place in the region");
            self.bytes.len().min(offset as usize)
        };
        &self.bytes[index(range.start)..index(range.end)]
    }

    /// A write, with zeros before it where the file was shorter.
    pub fn write(&mut self, position_bytes: u64, new: &[u8]) {
        let offset = position_bytes.checked_sub(self.start_bytes).expect("a place in the region");
        let end = position_bytes + new.len() as u64;
        assert!(!self.is_region || end <= self.end_bytes(), "a region does not grow");
        if !new.is_empty() {
            write_vector(&mut self.bytes, new, offset);
        }
    }

    /// A cut, or growth by zeros.
    pub fn set_len(&mut self, length_bytes: u64) {
        assert!(!self.is_region, "a region does not change its length");
        self.bytes.resize(length_bytes as usize, 0);
    }

    /// Compares the region with what was `found` in its place; the first difference.
    pub fn compare(&self, found: &[u8]) -> Result<(), String> {
        compare(self.start_bytes, found, &self.bytes)
    }
}

/// The first difference between two runs of bytes at a place of a file, for people to read.
pub(crate) fn compare(position_bytes: u64, found: &[u8], expected: &[u8]) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    let pairs = found.iter().zip(expected);
    let Some(index) = pairs.clone().position(|(a, b)| a != b) else {
        let (found, expected) = (found.len(), expected.len());
        return Err(format!("{found} bytes instead of {expected} at position {position_bytes}"));
    };
    let wrong = pairs.filter(|(a, b)| a != b).count();
    let at = position_bytes + index as u64;
    Err(format!(
        "{:#04x} instead of {:#04x} at position {at} (page {}, byte {} of it); {wrong} of {} bytes \
         at position {position_bytes} are wrong",
        found[index],
        expected[index],
        at / 4096,
        at % 4096,
        expected.len(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_file_grows_by_zeros_and_reads_end_with_it() {
        let mut model = Model::new(vec![1, 2, 3]);
        model.write(5, &[6, 7]);
        assert_eq!(model.bytes(), [1, 2, 3, 0, 0, 6, 7]);
        assert_eq!(model.read(6..100), [7]);
        assert_eq!(model.read(50..100), []);
        model.write(50, &[]);
        assert_eq!(model.end_bytes(), 7, "an empty write does not grow a file");
        model.set_len(2);
        model.set_len(4);
        assert_eq!(model.bytes(), [1, 2, 0, 0]);
    }

    #[test]
    fn a_region_counts_from_its_start() {
        let mut model = Model::region(100, vec![0; 10]);
        model.write(109, &[9]);
        assert_eq!(model.read(108..110), [0, 9]);
        assert_eq!((model.start_bytes(), model.end_bytes()), (100, 110));
    }

    #[test]
    #[should_panic(expected = "a region does not grow")]
    fn a_region_does_not_grow() {
        Model::region(100, vec![0; 10]).write(109, &[1, 2]);
    }

    #[test]
    fn a_difference_is_named_by_its_place() {
        let model = Model::region(4090, vec![5; 20]);
        let mut found = vec![5; 20];
        assert_eq!(model.compare(&found), Ok(()));
        found[7] = 6;
        let message = model.compare(&found).unwrap_err();
        assert!(message.starts_with("0x06 instead of 0x05 at position 4097 (page 1, byte 1"));
        let message = model.compare(&found[..5]).unwrap_err();
        assert_eq!(message, "5 bytes instead of 20 at position 4090");
    }
}
