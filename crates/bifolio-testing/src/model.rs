//! Expected bytes of a file, as a plain vector.
//!
//! A model describes a whole file that only its owner changes ([`Model::new`]), or one region of a
//! file whose other regions belong to other threads and whose length does not change
//! ([`Model::region`]). Neighbouring regions may share a folio, on purpose.
//!
//! The model of a memory file ([`Model::in_memory`]) knows its holes, too.

use std::ops::{Range, RangeInclusive};

use crate::holes::Holes;
use crate::memory::write_vector;

/// Expected bytes of a file, or of a region of it.
#[derive(Clone, Debug)]
pub struct Model {
    start_bytes: u64,
    bytes: Vec<u8>,
    is_region: bool,
    /// Set for a memory file.
    holes: Option<Holes>,
}

impl Model {
    /// The model of a file that holds `bytes`.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { start_bytes: 0, bytes, is_region: false, holes: None }
    }

    /// Creates the model of `bytes` at `start_bytes` of a file that other threads use, too.
    ///
    /// # Panics
    /// If there are none.
    pub fn region(start_bytes: u64, bytes: Vec<u8>) -> Self {
        assert!(!bytes.is_empty(), "a region has bytes");
        Self { start_bytes, bytes, is_region: true, holes: None }
    }

    /// Switches to the model of a memory file with folios of `folio_bytes`, to which nothing was
    /// written yet.
    pub fn in_memory(mut self, folio_bytes: u64) -> Self {
        let mut holes = Holes::new(folio_bytes);
        if self.is_region {
            // The neighbours share it with us: they never see to it that it is a hole.
            for edge in [self.start_bytes, self.end_bytes()] {
                if !edge.is_multiple_of(folio_bytes) {
                    holes.note_room(edge..edge + 1);
                }
            }
        }
        self.holes = Some(holes);
        self
    }

    /// The bytes that it should hold.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the start of the region; 0 for a whole file.
    pub fn start_bytes(&self) -> u64 {
        self.start_bytes
    }

    /// Returns the end of the region or file.
    pub fn end_bytes(&self) -> u64 {
        self.start_bytes + self.bytes.len() as u64
    }

    /// Returns `true` if other threads use the file, too.
    pub fn is_region(&self) -> bool {
        self.is_region
    }

    /// Returns the expected bytes of a read of a range of the file; fewer at the end.
    pub fn read(&self, range: Range<u64>) -> &[u8] {
        &self.bytes[self.indices(&range)]
    }

    /// Returns the indices of the existing bytes of a range.
    fn indices(&self, range: &Range<u64>) -> Range<usize> {
        let index = |position: u64| {
            let offset = position.checked_sub(self.start_bytes).expect("a place in the region");
            self.bytes.len().min(offset as usize)
        };
        index(range.start)..index(range.end)
    }

    /// Writes, with zeros before it if the file was shorter.
    pub fn write(&mut self, position_bytes: u64, new: &[u8]) {
        let offset = position_bytes.checked_sub(self.start_bytes).expect("a place in the region");
        let end = position_bytes + new.len() as u64;
        assert!(!self.is_region || end <= self.end_bytes(), "a region does not grow");
        if !new.is_empty() {
            write_vector(&mut self.bytes, new, offset);
        }
        if let Some(holes) = &mut self.holes {
            holes.note_written(position_bytes..end);
        }
    }

    /// Allocates a range: no byte changes, and the file is at least as long.
    pub fn allocate(&mut self, range: Range<u64>) {
        assert!(!self.is_region || range.end <= self.end_bytes(), "a region does not grow");
        if !range.is_empty() && range.end > self.end_bytes() {
            self.bytes.resize(range.end as usize, 0);
        }
        if let Some(holes) = &mut self.holes {
            holes.note_room(range);
        }
    }

    /// Notes that holes of the range were pinned: their zeros may be in memory now.
    pub fn note_pinned(&mut self, range: Range<u64>) {
        if let Some(holes) = &mut self.holes {
            holes.note_pinned(range);
        }
    }

    /// Punches a hole: zeros up to the end of file.
    pub fn punch(&mut self, mut range: Range<u64>) {
        if let Some(holes) = self.holes.as_ref().filter(|_| !self.is_region)
            && range.end >= self.end_bytes()
        {
            range.end = range.end.max(holes.end_of_unit(self.end_bytes()));
        }
        let part = self.indices(&range);
        self.bytes[part].fill(0);
        let own = self.start_bytes..self.end_bytes();
        if let Some(holes) = &mut self.holes {
            let bytes = &self.bytes;
            holes.punch(range, |unit| is_zero(bytes, &own, unit));
        }
    }

    /// Returns `true` if the range has a hole; `None` if that is unspecified.
    pub fn has_hole(&self, range: Range<u64>) -> Option<bool> {
        self.holes.as_ref().and_then(|holes| holes.has_hole(range))
    }

    /// Returns the minimum and maximum bytes of all folios that are not holes.
    pub fn room_bytes(&self) -> RangeInclusive<u64> {
        self.holes.as_ref().map_or(0..=0, Holes::room_bytes)
    }

    /// Checks the result of a seek for data.
    pub fn check_seek_data(&self, position: u64, found: Option<u64>) -> Result<(), String> {
        let end = self.end_bytes();
        if position >= end && !self.is_region {
            return expect_none("seek_data", position, found);
        }
        if found.is_some_and(|found| found >= end) && !self.is_region {
            return Err(format!("seek_data({position}) answers {found:?}, beyond the end"));
        }
        if let Some(holes) = &self.holes {
            return holes.check_seek_data(position, found, end);
        }
        // The storage knows the holes; but only zeros can be in one.
        let stop = found.unwrap_or(end).min(end);
        if stop < position || self.read(position..stop).iter().any(|byte| *byte != 0) {
            return Err(format!("seek_data({position}) answers {found:?}, past data"));
        }
        Ok(())
    }

    /// Checks the result of a seek for a hole.
    pub fn check_seek_hole(&self, position: u64, found: Option<u64>) -> Result<(), String> {
        let end = self.end_bytes();
        if position >= end && !self.is_region {
            return expect_none("seek_hole", position, found);
        }
        match found {
            Some(found) if found <= end || self.is_region => {
                if let Some(holes) = &self.holes {
                    return holes.check_seek_hole(position, found, end);
                }
                let is_data = self.read(found..found + 1).iter().any(|byte| *byte != 0);
                if found < position || is_data {
                    return Err(format!("seek_hole({position}) answers {found}, where data is"));
                }
                Ok(())
            }
            _ => Err(format!("seek_hole({position}) answers {found:?} in {end} bytes")),
        }
    }

    /// Truncates the file or extends it with zeros.
    pub fn set_len(&mut self, length_bytes: u64) {
        assert!(!self.is_region, "a region does not change its length");
        let is_cut = length_bytes < self.end_bytes();
        self.bytes.resize(length_bytes as usize, 0);
        let own = self.start_bytes..self.end_bytes();
        if let Some(holes) = self.holes.as_mut().filter(|_| is_cut) {
            let bytes = &self.bytes;
            holes.cut(length_bytes, |unit| is_zero(bytes, &own, unit));
        }
    }

    /// Compares the region with the bytes found; returns the first difference.
    pub fn compare(&self, found: &[u8]) -> Result<(), String> {
        compare(self.start_bytes, found, &self.bytes)
    }
}

/// Returns `true` if the part of `unit` in the region `own`, which holds `bytes`, is all zeros.
fn is_zero(bytes: &[u8], own: &Range<u64>, unit: Range<u64>) -> bool {
    let start = unit.start.clamp(own.start, own.end) - own.start;
    let end = unit.end.clamp(own.start, own.end) - own.start;
    bytes[start as usize..end as usize].iter().all(|byte| *byte == 0)
}

fn expect_none(seek: &str, position: u64, found: Option<u64>) -> Result<(), String> {
    match found {
        None => Ok(()),
        Some(found) => Err(format!("{seek}({position}), beyond the end, answers {found}")),
    }
}

/// Describes the first difference between two byte strings at a position of a file.
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
    fn a_memory_file_knows_its_holes() {
        let mut model = Model::new(Vec::new()).in_memory(4096);
        model.write(5000, &[1; 10]);
        assert_eq!((model.end_bytes(), model.room_bytes()), (5010, 4096..=4096));
        assert!(model.check_seek_data(0, Some(4096)).is_ok());
        assert!(model.check_seek_data(0, Some(0)).is_err());
        assert!(model.check_seek_data(0, Some(5010)).is_err(), "beyond the end");
        assert!(model.check_seek_data(5010, Some(5010)).is_err());
        assert!(model.check_seek_data(5010, None).is_ok());
        assert!(model.check_seek_hole(5000, Some(5010)).is_ok());
        assert!(model.check_seek_hole(5000, None).is_err());
        assert!(model.check_seek_hole(5000, Some(8192)).is_err());
        model.allocate(8000..9000);
        assert_eq!((model.end_bytes(), model.room_bytes()), (9000, 8192..=8192));
        model.allocate(20_000..20_000);
        assert_eq!((model.end_bytes(), model.room_bytes()), (9000, 8192..=8192));
        model.punch(5005..8192);
        assert_eq!(model.read(5003..5007), [1, 1, 0, 0]);
        assert!(model.check_seek_hole(5000, Some(5000)).is_err(), "it has data still");
        model.punch(4096..5005);
        assert!(model.check_seek_hole(5000, Some(5000)).is_ok());
        model.set_len(4097);
        assert_eq!(model.room_bytes(), 4096..=4096);
        model.set_len(4096);
        assert_eq!(model.room_bytes(), 0..=0);
    }

    #[test]
    fn a_region_shares_its_edges() {
        let model = Model::region(100, vec![0; 20_000]).in_memory(4096);
        assert_eq!(model.room_bytes(), 8192..=8192);
        assert!(model.check_seek_data(5000, Some(50_000)).is_ok(), "that is the neighbours'");
        assert!(model.check_seek_hole(100, Some(50_000)).is_err(), "there was a hole");
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
