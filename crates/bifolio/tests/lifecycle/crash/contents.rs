//! Contents of a file of records and of a log, and the checks after a crash.
//!
//! Each word of a record of 1 KiB encodes its index, its record, and the sequence number of its
//! write: so every word can be judged by itself. Zeros are sequence number 0.
//!
//! Each byte of the log follows from its position, and is not 0: zeros are holes.

use std::ops::{Range, RangeInclusive};

pub const RECORD_BYTES: u64 = 1 << 10;
const WORDS: u64 = RECORD_BYTES / 8;

/// Returns the position of a record.
pub fn place(slot: u64) -> u64 {
    slot * RECORD_BYTES
}

/// The bytes of a record.
pub fn record(slot: u64, sequence: u32) -> Vec<u8> {
    (0..WORDS).flat_map(|index| word(slot, index, sequence).to_le_bytes()).collect()
}

fn word(slot: u64, index: u64, sequence: u32) -> u64 {
    (u64::from(sequence) << 32) | (slot * WORDS + index + 1)
}

/// The bytes of the log.
pub fn log_bytes(places: Range<u64>) -> Vec<u8> {
    places.map(log_byte).collect()
}

fn log_byte(place: u64) -> u8 {
    (place.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8 | 1
}

/// State that must be found after a crash.
#[derive(Clone, Debug)]
pub struct Expected {
    /// Minimum sequence number of each record.
    pub sequences: Vec<u32>,
    /// Durable length of the log.
    pub log_bytes: u64,
    /// Maximum length of the log.
    pub log_bytes_max: u64,
}

impl Expected {
    /// Records of zeros and an empty log.
    pub fn new(slots: u64) -> Self {
        Self { sequences: vec![0; slots as usize], log_bytes: 0, log_bytes_max: 0 }
    }

    /// Notes that this record, or a newer one in its place, is durable.
    pub fn note_record(&mut self, slot: u64, sequence: u32) {
        let known = &mut self.sequences[slot as usize];
        *known = sequence.max(*known);
    }

    /// Checks all records. Returns the lowest and the highest sequence number in each.
    pub fn check_records(&self, data: &[u8], context: &str) -> Vec<RangeInclusive<u32>> {
        assert_eq!(data.len() as u64, place(self.sequences.len() as u64), "{context}");
        let mut all = Vec::new();
        for ((slot, bytes), known) in
            (0..).zip(data.chunks(RECORD_BYTES as usize)).zip(&self.sequences)
        {
            let found = sequences_in(slot, bytes, context);
            assert!(
                found.start() >= known,
                "record {slot} is of {found:#x?}, and {known:#x} was durable, {context}"
            );
            all.push(found);
        }
        all
    }

    /// Checks the whole log.
    pub fn check_log(&self, log: &[u8], context: &str) {
        let length = log.len() as u64;
        let lengths = self.log_bytes..=self.log_bytes_max;
        assert!(lengths.contains(&length), "{length} bytes of log, not {lengths:?}, {context}");
        for (place, byte) in (0..).zip(log) {
            let may_be_a_hole = place >= self.log_bytes;
            assert!(
                *byte == log_byte(place) || (*byte == 0 && may_be_a_hole),
                "byte {place} of the log is {byte:#x}; {} of {length} were durable, {context}",
                self.log_bytes
            );
        }
    }
}

/// Returns the sequence numbers of the words of a record, from the lowest to the highest.
fn sequences_in(slot: u64, bytes: &[u8], context: &str) -> RangeInclusive<u32> {
    let (mut lowest, mut highest) = (u32::MAX, 0);
    for (index, bytes) in (0..).zip(bytes.chunks(8)) {
        let found = u64::from_le_bytes(bytes.try_into().expect("a record has whole words"));
        let sequence = (found >> 32) as u32;
        let is_written = sequence > 0 && found == word(slot, index, sequence);
        assert!(
            is_written || found == 0,
            "word {index} of record {slot} is {found:#018x}, which was never written, {context}"
        );
        lowest = lowest.min(sequence);
        highest = highest.max(sequence);
    }
    lowest..=highest
}
