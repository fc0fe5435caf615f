//! Which chunks of the arena may be registered, and where they are.
//!
//! The arena tells when a chunk is whole and before it is not (`Rings` is its watcher); a ring
//! asks before it registers one. A chunk that lacks pages is never registered: the kernel would
//! make them resident, beyond the bound.

use crate::io::span::Span;
use crate::memory::{Arena, CHUNK_BYTES};
use crate::sync::{AtomicBool, Ordering};
use crate::sys::ring::BUFFERS_MAX;

/// See the head of the file.
#[derive(Debug)]
pub(super) struct Chunks {
    /// Address of the first chunk.
    base: usize,
    whole: Box<[AtomicBool]>,
}

/// The chunk a run of bytes lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChunkPlace {
    pub(super) number: usize,
    /// Its first byte.
    pub(super) start: *mut u8,
}

impl Chunks {
    /// The chunks of `arena`, as many as a ring can number.
    pub(super) fn of(arena: &Arena) -> Self {
        let count = arena.chunks().min(BUFFERS_MAX);
        let whole = (0..count).map(|_| AtomicBool::new(false)).collect();
        Self { base: arena.base().addr(), whole }
    }

    pub(super) fn len(&self) -> usize {
        self.whole.len()
    }

    /// Where `span` lies, if that is in one of the chunks.
    pub(super) fn place_of(&self, span: &Span) -> Option<ChunkPlace> {
        let chunk_bytes = CHUNK_BYTES as usize;
        let distance = span.start().addr().checked_sub(self.base)?;
        let (number, offset) = (distance / chunk_bytes, distance % chunk_bytes);
        let is_inside = number < self.len() && offset + span.len() <= chunk_bytes;
        is_inside.then(|| ChunkPlace { number, start: span.start().wrapping_sub(offset) })
    }

    /// Whether every page of the chunk is resident and charged.
    pub(super) fn is_whole(&self, number: usize) -> bool {
        // Relaxed: the lock of a ring's tables orders this with `set_whole`; see
        // `Rings::before_release`.
        self.whole[number].load(Ordering::Relaxed)
    }

    /// Notes whether the chunk is whole. Those without a number are nobody's concern.
    pub(super) fn set_whole(&self, number: usize, is_whole: bool) {
        if let Some(whole) = self.whole.get(number) {
            // Relaxed: as in `is_whole`.
            whole.store(is_whole, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::HugePages;
    use crate::sys::probe::Features;
    use std::ptr::NonNull;

    #[test]
    fn a_run_has_a_place_if_it_lies_in_one_chunk() {
        let features = Features::probe(&[]);
        let arena = Arena::new(4 << 20, 4 << 20, HugePages::Auto, features).unwrap();
        let chunks = Chunks::of(&arena);
        let place = |offset: usize, length| {
            let start = NonNull::new(arena.base().wrapping_add(offset)).unwrap();
            let place = chunks.place_of(&Span::new(start, length))?;
            assert_eq!(place.start, arena.base().wrapping_add(place.number << 21));
            Some(place.number)
        };
        let chunk = CHUNK_BYTES as usize;
        assert_eq!((place(0, 4096), place(0, chunk)), (Some(0), Some(0)));
        assert_eq!((place(chunk - 4096, 4096), place(chunk - 4096, 4097)), (Some(0), None));
        assert_eq!((place(chunk, 1), place(2 * chunk - 1, 1)), (Some(1), Some(1)));
        let end = arena.chunks() * chunk;
        assert_eq!((place(end, 1), place(4096_usize.wrapping_neg(), 1)), (None, None));
    }

    #[test]
    fn chunks_without_a_number_are_never_whole() {
        let features = Features::probe(&[]);
        let arena = Arena::new(4 << 20, 4 << 20, HugePages::Auto, features).unwrap();
        let chunks = Chunks::of(&arena);
        chunks.set_whole(1, true);
        let count = arena.chunks();
        chunks.set_whole(count, true);
        assert_eq!((chunks.len(), chunks.is_whole(0), chunks.is_whole(1)), (count, false, true));
    }
}
