//! Checks that a read saw all of a write in a page, or nothing of it.
//!
//! A reader that sees a word of a write in a page sees, where the write changed other words of that
//! page, the same write or a later one; never a value from before the write began. Raw stores
//! through maps are seen word by word and are not judged here.

use super::{Change, History, Kind, PAGE_WORDS, Violation, WORD_BYTES};
use std::collections::HashMap;
use std::sync::Arc;

impl History {
    /// Judges bytes of one page: all that a `read_at` requested, or those before the end of file,
    /// at `position`.
    pub fn check_whole(&self, bytes: &[u8], position: u64) -> Result<(), Violation> {
        let first = position / WORD_BYTES;
        let count = PAGE_WORDS - first % PAGE_WORDS;
        let words = bytes.chunks_exact(WORD_BYTES as usize).take(count as usize);
        let values = words.map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
        let changes = self.page(first / PAGE_WORDS).clone();
        let by_id: HashMap<u64, &Arc<Change>> = changes.iter().map(|c| (c.id, c)).collect();
        let write_of = |value| by_id.get(&Change::id_of(value)).filter(|_| value != 0);
        let seen: Vec<_> = values.map(|value| write_of(value).copied()).collect();
        let mut writes: Vec<&Arc<Change>> = seen.iter().copied().flatten().collect();
        writes.dedup_by_key(|write| write.id);
        writes.sort_by_key(|write| write.id);
        writes.dedup_by_key(|write| write.id);
        for write in writes.into_iter().filter(|write| write.kind == Kind::Write) {
            for (word, other) in (first..).zip(&seen).filter(|(word, _)| write.covers(*word)) {
                let is_older = match other {
                    Some(other) => other.ended() < write.begun,
                    // Zeros: of a cut that may be as late, or of none.
                    None => !changes.iter().any(|zero| {
                        zero.kind == Kind::Zero && zero.covers(word) && zero.ended() >= write.begun
                    }),
                };
                if is_older {
                    return Err(self.torn(write, word));
                }
            }
        }
        Ok(())
    }

    fn torn(&self, write: &Change, word: u64) -> Violation {
        Violation(format!(
            "{}: read_at saw a part of change {} ({} by thread {}, words {:?}), and in word {word} \
             of the same page the older value",
            self.name, write.id, write.call, write.thread, write.words
        ))
    }
}
