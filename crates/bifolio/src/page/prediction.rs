//! Prediction: where the frame of a page probably is, before its Entry has been read.
//!
//! A file that was filled in order has its frames in the order of its pages (`memory::arena` sees
//! to that), at one distance. While at least seven in eight of its folios stand so, the distance is
//! published, and a hit touches the predicted bytes while the Entry is still on its way from
//! memory: two waits become one. A wrong prediction costs a touch of some other frame's line;
//! nothing is ever read through it. Noted at each insert and removal; a hint, so nothing orders it,
//! its counts may drift under races, and the model checker does not see it.

use std::sync::atomic::{AtomicU64, Ordering};

/// Published while there is no prediction. Distances are multiples of the page, and get this bit.
const PREDICTS: u64 = 1;

/// See the head of the file.
#[derive(Debug, Default)]
pub(super) struct Prediction {
    /// Frame minus page index of the folios that are counted.
    distance: AtomicU64,
    /// Folios that stand at that distance.
    following: AtomicU64,
}

impl Prediction {
    /// A folio whose first page is `index` came to `frame`; the file has `resident` folios now.
    pub(super) fn note_insert(&self, index: u64, frame: u32, resident: u64, published: &AtomicU64) {
        let distance = u64::from(frame).wrapping_sub(index);
        let following = self.following.load(Ordering::Relaxed);
        if distance == self.distance.load(Ordering::Relaxed) {
            self.following.store(following + 1, Ordering::Relaxed);
        } else if following * 2 < resident {
            self.distance.store(distance, Ordering::Relaxed);
            self.following.store(1, Ordering::Relaxed);
        }
        self.publish(resident, published);
    }

    /// The folio left.
    pub(super) fn note_removal(
        &self,
        index: u64,
        frame: u32,
        resident: u64,
        published: &AtomicU64,
    ) {
        let distance = u64::from(frame).wrapping_sub(index);
        if distance == self.distance.load(Ordering::Relaxed) {
            let following = self.following.load(Ordering::Relaxed);
            self.following.store(following.saturating_sub(1), Ordering::Relaxed);
        }
        self.publish(resident, published);
    }

    /// Stores only what changed: the word shares its line with what every hit reads.
    fn publish(&self, resident: u64, published: &AtomicU64) {
        let following = self.following.load(Ordering::Relaxed);
        let distance_bytes = self.distance.load(Ordering::Relaxed).wrapping_mul(super::PAGE_BYTES);
        let worth_it = following > 0 && following * 8 >= resident * 7;
        let word = if worth_it { distance_bytes | PREDICTS } else { 0 };
        if published.load(Ordering::Relaxed) != word {
            published.store(word, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_file_filled_in_order_is_predicted_a_scattered_one_not() {
        let (prediction, published) = (Prediction::default(), AtomicU64::new(0));
        // The end first, then in order from the start, as many formats are read.
        prediction.note_insert(999, 100, 1, &published);
        for index in 0..100 {
            prediction.note_insert(index, 101 + index as u32, index + 2, &published);
        }
        assert_eq!(published.load(Ordering::Relaxed), (101 << 12) | PREDICTS);
        // A fifth of it goes and comes back elsewhere.
        for index in 0..25 {
            prediction.note_removal(index, 101 + index as u32, 100, &published);
            prediction.note_insert(index, 900 - index as u32, 101, &published);
        }
        assert_eq!(published.load(Ordering::Relaxed), 0);
    }
}
