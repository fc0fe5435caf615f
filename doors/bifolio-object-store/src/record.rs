//! The index of the disk tier: a header, and one record for each slot.
//!
//! A record names the part in its slot and has the checksums of the part's blocks. Nothing orders
//! the writes of records and parts, and nothing is flushed: after a crash a record is believed only
//! if its own checksum is right, and a block only if its checksum is the one of the record. The
//! checksums of blocks depend on the part that they belong to, so that a block of another part is
//! as wrong as a damaged one.
//!
//! ```text
//! header    magic, part_bytes, block_bytes, slots, checksum               4096 bytes
//! record    checksum, object, number, length, checksums of the blocks     a multiple of 64 bytes
//! ```

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::object::ObjectId;

/// Bytes of the header.
pub(crate) const HEADER_BYTES: u64 = 4096;

const MAGIC: u64 = u64::from_le_bytes(*b"bifobj01");
/// Bytes of a record before the checksums of the blocks.
const RECORD_HEAD_BYTES: usize = 32;

/// A part of a version of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PartKey {
    pub(crate) object: ObjectId,
    pub(crate) number: u32,
}

impl PartKey {
    /// Returns the checksum of a block of this part.
    pub(crate) fn block_checksum(&self, block: usize, bytes: &[u8]) -> u64 {
        let (first, second) = self.object.split_at(8);
        let [first, second] = [first, second]
            .map(|half| u64::from_le_bytes(half.try_into().expect("half of 16 bytes")));
        let position = u64::from(self.number).rotate_left(32) ^ block as u64;
        xxh3_64_with_seed(bytes, first ^ second.rotate_left(17) ^ position)
    }
}

/// The layout of a disk tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) part_bytes: u64,
    pub(crate) block_bytes: u64,
    pub(crate) slots: u32,
}

impl Layout {
    /// Returns the length of a record, bytes.
    pub(crate) fn record_bytes(&self) -> usize {
        let blocks = self.part_bytes.div_ceil(self.block_bytes) as usize;
        (RECORD_HEAD_BYTES + 8 * blocks).next_multiple_of(64)
    }

    /// Returns the position of a slot's record in the index.
    pub(crate) fn record_position(&self, slot: u32) -> u64 {
        HEADER_BYTES + u64::from(slot) * self.record_bytes() as u64
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES as usize);
        for field in [MAGIC, self.part_bytes, self.block_bytes, u64::from(self.slots)] {
            bytes.extend(field.to_le_bytes());
        }
        bytes.extend(xxh3_64_with_seed(&bytes, MAGIC).to_le_bytes());
        bytes.resize(HEADER_BYTES as usize, 0);
        bytes
    }

    /// Returns `true` if an index with this header has this layout. The number of slots may differ.
    pub(crate) fn accepts(&self, header: &[u8]) -> bool {
        let Some((fields, rest)) = header.split_at_checked(32) else { return false };
        let Some(checksum) = rest.first_chunk() else { return false };
        let fits = xxh3_64_with_seed(fields, MAGIC) == u64::from_le_bytes(*checksum);
        // The number of slots is the last field.
        fits && fields[..24] == self.encode()[..24]
    }
}

/// The part in a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) key: PartKey,
    pub(crate) length_bytes: u32,
    pub(crate) checksums: Box<[u64]>,
}

impl Record {
    pub(crate) fn encode(&self, layout: &Layout, slot: u32) -> Vec<u8> {
        let mut bytes = vec![0; 8];
        bytes.extend(self.key.object);
        bytes.extend(self.key.number.to_le_bytes());
        bytes.extend(self.length_bytes.to_le_bytes());
        bytes.extend(self.checksums.iter().flat_map(|checksum| checksum.to_le_bytes()));
        bytes.resize(layout.record_bytes(), 0);
        let checksum = record_checksum(&bytes, slot);
        bytes[..8].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Returns the record in `bytes`, or `None` if there is none, or not of this slot.
    pub(crate) fn decode(bytes: &[u8], layout: &Layout, slot: u32) -> Option<Self> {
        let checksum = u64::from_le_bytes(*bytes.first_chunk()?);
        if bytes.len() != layout.record_bytes() || checksum != record_checksum(bytes, slot) {
            return None;
        }
        let object = *bytes[8..].first_chunk()?;
        let number = u32::from_le_bytes(*bytes[24..].first_chunk()?);
        let length_bytes = u32::from_le_bytes(*bytes[28..].first_chunk()?);
        if length_bytes == 0 || u64::from(length_bytes) > layout.part_bytes {
            return None;
        }
        let blocks = u64::from(length_bytes).div_ceil(layout.block_bytes) as usize;
        let checksums = bytes[RECORD_HEAD_BYTES..].chunks_exact(8).take(blocks);
        let checksums = checksums.map(|each| u64::from_le_bytes(each.try_into().expect("8 bytes")));
        let key = PartKey { object, number };
        Some(Self { key, length_bytes, checksums: checksums.collect() })
    }
}

/// Returns the checksum of a record of this slot. A record of zeros has another one.
fn record_checksum(record: &[u8], slot: u32) -> u64 {
    xxh3_64_with_seed(&record[8..], MAGIC ^ u64::from(slot))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { part_bytes: 10_000, block_bytes: 4096, slots: 9 };

    fn record() -> Record {
        let key = PartKey { object: *b"0123456789abcdef", number: 7 };
        let part: Vec<u8> = (0..9000_u32).map(|byte| byte as u8).collect();
        let blocks = part.chunks(LAYOUT.block_bytes as usize).enumerate();
        let checksums = blocks.map(|(block, bytes)| key.block_checksum(block, bytes)).collect();
        Record { key, length_bytes: 9000, checksums }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let bytes = record().encode(&LAYOUT, 3);
        assert_eq!(Record::decode(&bytes, &LAYOUT, 3), Some(record()));
    }

    #[test]
    fn every_flipped_bit_of_a_record_and_another_slot_are_found() {
        let mut bytes = record().encode(&LAYOUT, 3);
        assert_eq!(Record::decode(&bytes, &LAYOUT, 4), None);
        for bit in 0..bytes.len() * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Record::decode(&bytes, &LAYOUT, 3), None, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(Record::decode(&[0; 64], &LAYOUT, 0), None);
        assert_eq!(Record::decode(&bytes[..60], &LAYOUT, 3), None);
    }

    #[test]
    fn a_header_is_accepted_for_its_own_layout_only() {
        let header = LAYOUT.encode();
        assert!(LAYOUT.accepts(&header));
        assert!(Layout { slots: 90, ..LAYOUT }.accepts(&header));
        assert!(!Layout { part_bytes: 20_000, ..LAYOUT }.accepts(&header));
        assert!(!Layout { block_bytes: 8192, ..LAYOUT }.accepts(&header));
        for bit in 0..40 * 8 {
            let mut damaged = header.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(!LAYOUT.accepts(&damaged), "bit {bit}");
        }
        assert!(!LAYOUT.accepts(&header[..20]));
    }
}
