//! What a transfer asks for, and where the cache may make it by itself.
//!
//! Made by the engine for each transfer it is about to submit; answered by
//! [`Backing::submission`](super::Backing::submission) and judged by
//! [`Backing::completed`](super::Backing::completed).

use std::os::fd::BorrowedFd;

use super::align::ALIGNMENT_BYTES_MAX;
use super::span::Span;
use super::{Alignment, Operation};

/// A transfer about to be made, or just made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IoRequest {
    /// [`Read`](Operation::Read) or [`Write`](Operation::Write).
    pub operation: Operation,
    /// The first byte.
    pub position_bytes: u64,
    /// How many bytes.
    pub length_bytes: usize,
    /// What the transfer happens to be multiples of, up to 4096: its addresses in memory; its
    /// position, and the length of each of its buffers but the last.
    pub alignment: Alignment,
}

impl IoRequest {
    /// What a transfer of these spans asks for.
    pub(super) fn new(operation: Operation, position_bytes: u64, spans: &[Span]) -> Self {
        let (mut addresses, mut offsets) = (ALIGNMENT_BYTES_MAX, ALIGNMENT_BYTES_MAX);
        let (mut length_bytes, mut last) = (0, position_bytes);
        for span in spans {
            addresses |= span.start().addr() as u64;
            offsets |= last;
            last = span.len() as u64;
            length_bytes += span.len();
        }
        let lowest_bit = |bits: u64| bits & bits.wrapping_neg();
        let alignment =
            Alignment { memory_bytes: lowest_bit(addresses), offset_bytes: lowest_bit(offsets) };
        Self { operation, position_bytes, length_bytes, alignment }
    }

    /// Whether the transfer can start as it is where `needed` is the rule.
    pub(super) fn fits(&self, needed: Alignment) -> bool {
        self.alignment.memory_bytes >= needed.memory_bytes
            && self.alignment.offset_bytes >= needed.offset_bytes
    }
}

/// How the cache may make a transfer by itself.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Submission<'a> {
    /// The file, with the transfer's positions.
    pub file: BorrowedFd<'a>,
    /// How many of its bytes, from the first on: at least one, at most all. The cache makes the
    /// rest with `*_at`.
    pub length_bytes: usize,
    /// Where the file stands among those registered with the kernel.
    pub(super) slot: Option<u32>,
}

impl<'a> Submission<'a> {
    /// The first `length_bytes` bytes of the transfer go to or come from `file`.
    pub fn new(file: BorrowedFd<'a>, length_bytes: usize) -> Self {
        Self { file, length_bytes, slot: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::NonNull;

    fn request(position_bytes: u64, spans: &[(usize, usize)]) -> IoRequest {
        let span = |(address, length)| {
            Span::new(NonNull::new(std::ptr::without_provenance_mut(address)).unwrap(), length)
        };
        let spans: Vec<_> = spans.iter().copied().map(span).collect();
        IoRequest::new(Operation::Read, position_bytes, &spans)
    }

    fn alignment(position_bytes: u64, spans: &[(usize, usize)]) -> (u64, u64) {
        let found = request(position_bytes, spans).alignment;
        (found.memory_bytes, found.offset_bytes)
    }

    #[test]
    fn a_request_is_as_aligned_as_its_least_aligned_part() {
        assert_eq!(alignment(0, &[(8192, 4096)]), (4096, 4096));
        assert_eq!(alignment(512, &[(4100, 4096)]), (4, 512));
        assert_eq!(alignment(1, &[(1, 1)]), (1, 1));
        assert_eq!(alignment(0, &[(4096, 512), (16384, 4096)]), (4096, 512), "an inner length");
        assert_eq!(alignment(0, &[(4096, 4096), (16384, 100)]), (4096, 4096), "the last length");
        assert_eq!(alignment(1 << 40, &[(4096, 4096), (16386, 4096)]), (2, 4096));
        assert_eq!(request(0, &[(4096, 4096), (16384, 100)]).length_bytes, 4196);
    }

    #[test]
    fn a_request_fits_where_it_is_aligned_at_least_so() {
        let needed = Alignment { memory_bytes: 4, offset_bytes: 512 };
        assert!(request(1024, &[(4100, 700)]).fits(needed));
        assert!(!request(1024, &[(4101, 512)]).fits(needed));
        assert!(!request(1025, &[(4100, 512)]).fits(needed));
        assert!(!request(1024, &[(4100, 700), (8192, 512)]).fits(needed));
        assert!(request(1, &[(1, 1)]).fits(Alignment::NONE));
    }
}
