//! What has come of a part that is being fetched: whole blocks, from the first on.

use std::ops::Range;

use bytes::Bytes;

use super::error::Failure;

/// The blocks of a part that have come, and how its request ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct Received {
    blocks: Vec<Bytes>,
    bytes: u64,
    end: Option<Result<(), Failure>>,
}

impl Received {
    pub(crate) fn push(&mut self, block: Bytes) {
        self.bytes += block.len() as u64;
        self.blocks.push(block);
    }

    /// Notes that no more blocks come: the part is complete, or its request failed.
    pub(crate) fn finish(&mut self, end: Result<(), Failure>) {
        self.end = Some(end);
    }

    pub(crate) fn len(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn is_complete(&self) -> bool {
        matches!(self.end, Some(Ok(())))
    }

    pub(crate) fn failure(&self) -> Option<&Failure> {
        self.end.as_ref()?.as_ref().err()
    }

    /// Returns `true` if the bytes up to `end` are here, or never come.
    pub(crate) fn is_settled(&self, end: u64) -> bool {
        self.bytes >= end || self.end.is_some()
    }

    pub(crate) fn blocks(&self) -> &[Bytes] {
        &self.blocks
    }

    /// Returns the pieces of `range`, in order; `None` if they are not all here.
    pub(crate) fn pieces(&self, range: &Range<u64>) -> Option<Vec<Bytes>> {
        if range.end > self.bytes {
            return None;
        }
        let mut pieces = Vec::new();
        let mut start = 0;
        for block in &self.blocks {
            let end = start + block.len() as u64;
            if end > range.start && start < range.end {
                let within = range.start.max(start) - start..range.end.min(end) - start;
                pieces.push(block.slice(within.start as usize..within.end as usize));
            }
            start = end;
        }
        Some(pieces)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_those_of_the_range_once_they_are_here() {
        let mut received = Received::default();
        for block in [&b"0123"[..], b"4567", b"89"] {
            assert!(!received.is_settled(10));
            received.push(Bytes::from_static(block));
        }
        for start in 0..10 {
            for end in start + 1..=10 {
                let pieces = received.pieces(&(start..end)).unwrap().concat();
                assert_eq!(pieces, &b"0123456789"[start as usize..end as usize]);
            }
        }
        assert!(received.pieces(&(9..11)).is_none() && !received.is_settled(11));
        received.finish(Ok(()));
        assert!(received.is_complete() && received.is_settled(11));
    }
}
