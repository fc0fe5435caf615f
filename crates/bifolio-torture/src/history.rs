//! The changes of a file, and the bytes that a read of it may return.
//!
//! Every 8-byte word of a file holds the number of the change that wrote it and its own position,
//! or zero. A change has a beginning and an end in logical time. So a value that was read can be
//! judged without knowing the order in which overlapping changes took effect:
//!
//! ```text
//!   a read from r0 to r1 may return what change C wrote if
//!     C began before r1, and
//!     no change D that is certain began after C had ended, and ended before r0.
//! ```
//!
//! A failed change may have taken effect or not: it may be visible, and it hides nothing.

mod whole;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// Bytes of a word.
pub const WORD_BYTES: u64 = 8;
/// Words of a page.
const PAGE_WORDS: u64 = 512;
/// Bits of a word that encode its position.
const PLACE_BITS: u32 = 24;
/// Number of changes kept per page before those that no reader can see any more are dropped.
const CHANGES_KEPT: usize = 24;

/// Logical time, and the begin of the oldest call in progress.
#[derive(Debug)]
pub struct Clock {
    times: Mutex<Times>,
}

#[derive(Debug)]
struct Times {
    now: u64,
    /// For each thread, the begin of its current call, or `u64::MAX`.
    calls: Vec<u64>,
}

impl Clock {
    /// Creates a clock for `threads` threads.
    pub fn new(threads: usize) -> Self {
        Self { times: Mutex::new(Times { now: 1, calls: vec![u64::MAX; threads] }) }
    }

    /// Returns the next moment.
    pub fn tick(&self) -> u64 {
        self.times().tick()
    }

    /// Begins a call of a thread: nothing that it may still see is forgotten.
    pub fn begin_call(&self, thread: usize) -> u64 {
        let mut times = self.times();
        times.calls[thread] = times.tick();
        times.now
    }

    /// Ends the call of a thread, after it was judged.
    pub fn end_call(&self, thread: usize) {
        self.times().calls[thread] = u64::MAX;
    }

    fn oldest_call(&self) -> u64 {
        let times = self.times();
        times.calls.iter().copied().fold(times.now, u64::min)
    }

    fn times(&self) -> MutexGuard<'_, Times> {
        self.times.lock().expect("no thread panics with the clock locked")
    }
}

impl Times {
    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }
}

/// The value that a change leaves in the words it covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The bytes of the file when its history began.
    Birth,
    /// Words that encode the change, written whole in each page.
    Write,
    /// Words that encode the change, stored through a map one by one.
    Store,
    /// Zeros: a truncation or a punched hole.
    Zero,
}

/// One change of a file.
#[derive(Debug)]
pub struct Change {
    id: u64,
    kind: Kind,
    /// The call that made it.
    call: &'static str,
    thread: usize,
    words: Range<u64>,
    begun: u64,
    end: Mutex<End>,
}

/// The end of a change, and its effect.
#[derive(Clone, Copy, Debug)]
struct End {
    /// `u64::MAX` while it is in progress.
    moment: u64,
    /// Words before this one were certainly changed.
    certain_end: u64,
}

impl Change {
    /// Returns the value of the word `index` after the change.
    pub fn word(&self, index: u64) -> u64 {
        match self.kind {
            Kind::Write | Kind::Store => word_of(self.id, index),
            Kind::Birth | Kind::Zero => 0,
        }
    }

    /// Returns the change that leaves this value in a word; 0 for zeros.
    fn id_of(value: u64) -> u64 {
        value >> PLACE_BITS
    }

    fn covers(&self, word: u64) -> bool {
        self.words.contains(&word)
    }

    fn end(&self) -> End {
        *self.end.lock().expect("no thread panics with the end of a change locked")
    }

    fn ended(&self) -> u64 {
        self.end().moment
    }

    /// Returns `true` if it certainly changed the word, and had ended before `moment`.
    fn is_certain_before(&self, word: u64, moment: u64) -> bool {
        let end = self.end();
        self.covers(word) && end.moment < moment && word < end.certain_end
    }
}

/// A bijection of the word positions of a file of up to 128 MiB.
fn place(index: u64) -> u64 {
    index.wrapping_mul(0x9E_3779 | 1) & ((1 << PLACE_BITS) - 1)
}

/// The changes of one file.
#[derive(Debug)]
pub struct History {
    name: String,
    clock: Arc<Clock>,
    next_id: AtomicU64,
    /// Initial words; the words past the last are zeros.
    birth: Vec<u64>,
    /// Number of changes of a page kept before some are dropped.
    changes_kept: usize,
    pages: Vec<Mutex<Vec<Arc<Change>>>>,
}

/// A value that no correct read could have returned.
#[derive(Debug)]
pub struct Violation(pub String);

impl History {
    /// Creates a file of zeros, which never grows past `len_bytes_max`.
    pub fn new(name: String, clock: Arc<Clock>, len_bytes_max: u64) -> Self {
        let pages = len_bytes_max.div_ceil(PAGE_WORDS * WORD_BYTES);
        assert!(len_bytes_max / WORD_BYTES <= 1 << PLACE_BITS, "too large for the places of words");
        let birth = Arc::new(Change {
            id: 0,
            kind: Kind::Birth,
            call: "birth",
            thread: 0,
            words: 0..u64::MAX,
            begun: 0,
            end: Mutex::new(End { moment: 0, certain_end: u64::MAX }),
        });
        let pages = (0..pages).map(|_| Mutex::new(vec![Arc::clone(&birth)])).collect();
        let changes_kept = CHANGES_KEPT;
        Self { name, clock, next_id: AtomicU64::new(1), birth: Vec::new(), changes_kept, pages }
    }

    /// Creates a file with these bytes, whose history keeps everything: bytes that are not durable
    /// yet may be seen long after they were overwritten.
    pub fn of_bytes(name: String, clock: Arc<Clock>, bytes: &[u8]) -> Self {
        let words = bytes.chunks_exact(WORD_BYTES as usize);
        let birth =
            words.map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default())).collect();
        let changes_kept = usize::MAX;
        Self { birth, changes_kept, ..Self::new(name, clock, bytes.len() as u64) }
    }

    /// Begins a change of the bytes of `range` (whole words).
    pub fn begin(
        &self,
        call: &'static str,
        thread: usize,
        kind: Kind,
        range: Range<u64>,
    ) -> Arc<Change> {
        self.begin_as(self.next_id.fetch_add(1, Ordering::Relaxed), call, thread, kind, range)
    }

    /// Begins a change like [`begin`](Self::begin), with a number that exists already.
    pub fn begin_as(
        &self,
        id: u64,
        call: &'static str,
        thread: usize,
        kind: Kind,
        range: Range<u64>,
    ) -> Arc<Change> {
        let words = range.start / WORD_BYTES..range.end / WORD_BYTES;
        let change = Arc::new(Change {
            id,
            kind,
            call,
            thread,
            words: words.clone(),
            begun: self.clock.tick(),
            end: Mutex::new(End { moment: u64::MAX, certain_end: 0 }),
        });
        let oldest_call = self.clock.oldest_call();
        let pages = words.start / PAGE_WORDS..words.end.div_ceil(PAGE_WORDS);
        for page in pages.start..pages.end.min(self.pages.len() as u64) {
            let mut changes = self.page(page);
            if changes.len() > self.changes_kept {
                forget(&mut changes, page, oldest_call);
            }
            changes.push(Arc::clone(&change));
        }
        change
    }

    /// Ends a change; its first `certain_bytes` bytes were certainly changed.
    pub fn end(&self, change: &Change, certain_bytes: u64) {
        let certain_end = change.words.start + certain_bytes / WORD_BYTES;
        let end = End { moment: self.clock.tick(), certain_end };
        *change.end.lock().expect("no thread panics with the end of a change locked") = end;
    }

    /// Judges bytes (whole words) read at `position` by a call that began at `begun` and has just
    /// returned.
    pub fn check(
        &self,
        what: &str,
        bytes: &[u8],
        position: u64,
        begun: u64,
    ) -> Result<(), Violation> {
        let ended = self.clock.tick();
        let mut index = position / WORD_BYTES;
        let mut words = bytes.chunks_exact(WORD_BYTES as usize);
        let mut left = words.len() as u64;
        while left > 0 {
            let changes = self.page(index / PAGE_WORDS).clone();
            let by_id: HashMap<u64, &Arc<Change>> = changes.iter().map(|c| (c.id, c)).collect();
            let here = left.min(PAGE_WORDS - index % PAGE_WORDS);
            for _ in 0..here {
                let Some(word) = words.next() else { return Ok(()) };
                let value = u64::from_le_bytes(word.try_into().unwrap_or_default());
                let birth = self.birth.get(index as usize).copied().unwrap_or(0);
                if !may_be(&changes, &by_id, index, (value, birth), begun, ended) {
                    let told = self.tell(what, &changes, index, value, begun, ended);
                    return Err(Violation(told));
                }
                index += 1;
            }
            left -= here;
        }
        Ok(())
    }

    fn page(&self, page: u64) -> MutexGuard<'_, Vec<Arc<Change>>> {
        self.pages[page as usize].lock().expect("no thread panics with a page's changes locked")
    }

    fn tell(
        &self,
        what: &str,
        changes: &[Arc<Change>],
        index: u64,
        value: u64,
        begun: u64,
        ended: u64,
    ) -> String {
        let mut text = format!(
            "{}: {what} from {begun} to {ended} saw {value:#x} in word {index} (byte {}, page {}): \
             change {}, place {}; at first it was {:#x}; changes of this word:\n",
            self.name,
            index * WORD_BYTES,
            index / PAGE_WORDS,
            value >> PLACE_BITS,
            if value & ((1 << PLACE_BITS) - 1) == place(index) { "right" } else { "wrong" },
            self.birth.get(index as usize).copied().unwrap_or(0),
        );
        for change in changes.iter().filter(|change| change.covers(index)) {
            let certain = change.is_certain_before(index, u64::MAX);
            let _ = writeln!(
                text,
                "  {} {:?} {} by thread {}, words {:?}, from {} to {}{}",
                change.id,
                change.kind,
                change.call,
                change.thread,
                change.words,
                change.begun,
                change.ended(),
                if certain { "" } else { " (uncertain)" },
            );
        }
        text
    }
}

/// Returns the word that the change `id` leaves at `index`.
pub fn word_of(id: u64, index: u64) -> u64 {
    id << PLACE_BITS | place(index)
}

/// Returns `true` if a read may return `value`; `birth` is the initial value (see the module
/// documentation).
fn may_be(
    changes: &[Arc<Change>],
    by_id: &HashMap<u64, &Arc<Change>>,
    index: u64,
    (value, birth): (u64, u64),
    begun: u64,
    ended: u64,
) -> bool {
    let is_hidden = |seen: &Change| {
        let end = seen.ended();
        changes.iter().any(|later| later.begun > end && later.is_certain_before(index, begun))
    };
    let could_be_seen =
        |change: &Change| change.covers(index) && change.begun < ended && !is_hidden(change);
    if value == birth && by_id.get(&0).is_some_and(|change| could_be_seen(change)) {
        return true;
    }
    if value == 0 {
        return changes.iter().any(|change| change.kind == Kind::Zero && could_be_seen(change));
    }
    by_id
        .get(&(value >> PLACE_BITS))
        .is_some_and(|change| change.word(index) == value && could_be_seen(change))
}

/// Drops changes that no call in progress can see any more: a later one covers all of their part of
/// the page, and had ended before the oldest call began.
fn forget(changes: &mut Vec<Arc<Change>>, page: u64, oldest_call: u64) {
    let all = changes.clone();
    let in_page = |words: &Range<u64>| {
        let (start, end) = (page * PAGE_WORDS, (page + 1) * PAGE_WORDS);
        words.start.max(start)..words.end.min(end)
    };
    changes.retain(|old| {
        let covered = in_page(&old.words);
        let last = covered.end.saturating_sub(1);
        let is_hidden = |later: &Arc<Change>| {
            later.begun > old.ended()
                && later.covers(covered.start)
                && later.is_certain_before(last, oldest_call)
        };
        !all.iter().any(is_hidden)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history() -> History {
        History::new("file".into(), Arc::new(Clock::new(1)), 1 << 20)
    }

    fn bytes(change: &Change, index: u64) -> [u8; 8] {
        change.word(index).to_le_bytes()
    }

    #[test]
    fn a_read_sees_the_last_change_that_ended_before_it() {
        let history = history();
        let first = history.begin("write", 0, Kind::Write, 0..64);
        history.end(&first, 64);
        let second = history.begin("write", 0, Kind::Write, 8..16);
        history.end(&second, 8);
        let now = history.clock.tick();
        assert!(history.check("read", &bytes(&first, 0), 0, now).is_ok());
        assert!(history.check("read", &bytes(&second, 1), 8, now).is_ok());
        assert!(history.check("read", &bytes(&first, 1), 8, now).is_err(), "an old value");
        assert!(history.check("read", &[0; 8], 8, now).is_err(), "zeros");
        assert!(history.check("read", &bytes(&first, 2), 24, now).is_err(), "another place's");
        assert!(history.check("read", &[0; 8], 64, now).is_ok());
    }

    #[test]
    fn changes_that_overlap_the_read_may_be_seen_or_not() {
        let history = history();
        let first = history.begin("write", 0, Kind::Write, 0..8);
        history.end(&first, 8);
        let now = history.clock.tick();
        let second = history.begin("write", 0, Kind::Write, 0..8);
        assert!(history.check("read", &bytes(&first, 0), 0, now).is_ok());
        assert!(history.check("read", &bytes(&second, 0), 0, now).is_ok());
        history.end(&second, 8);
        assert!(history.check("read", &bytes(&first, 0), 0, now).is_ok());
        let later = history.clock.tick();
        assert!(history.check("read", &bytes(&first, 0), 0, later).is_err());
    }

    #[test]
    fn a_change_that_failed_hides_nothing() {
        let history = history();
        let first = history.begin("write", 0, Kind::Write, 0..16);
        history.end(&first, 16);
        let second = history.begin("write", 0, Kind::Write, 0..16);
        history.end(&second, 8);
        let now = history.clock.tick();
        assert!(history.check("read", &bytes(&first, 0), 0, now).is_err());
        assert!(history.check("read", &bytes(&first, 1), 8, now).is_ok());
        assert!(history.check("read", &bytes(&second, 1), 8, now).is_ok());
    }

    #[test]
    fn a_write_is_seen_whole_in_a_page_and_a_raw_store_word_by_word() {
        for (kind, is_whole) in [(Kind::Write, true), (Kind::Store, false)] {
            let history = history();
            let older = history.begin("write", 0, Kind::Write, 0..16);
            history.end(&older, 16);
            let change = history.begin("change", 0, kind, 0..16);
            let half = [bytes(&change, 0), bytes(&older, 1)].concat();
            assert_eq!(history.check_whole(&half, 0).is_err(), is_whole, "{kind:?}");
        }
    }

    #[test]
    fn first_contents_are_seen_until_they_are_overwritten() {
        let clock = Arc::new(Clock::new(1));
        let history = History::of_bytes("file".into(), clock, &[7; 4096]);
        let change = history.begin_as(100, "write", 0, Kind::Write, 8..16);
        history.end(&change, 8);
        let now = history.clock.tick();
        assert!(history.check("read", &[7; 8], 0, now).is_ok());
        assert!(history.check("read", &[0; 8], 0, now).is_err(), "zeros");
        assert!(history.check("read", &[7; 8], 8, 0).is_ok(), "a read from before");
        assert!(history.check("read", &[7; 8], 8, now).is_err(), "overwritten");
        assert!(history.check("read", &word_of(100, 1).to_le_bytes(), 8, now).is_ok());
    }

    #[test]
    fn forgetting_keeps_what_a_call_under_way_may_see() {
        let history = history();
        let first = history.begin("write", 0, Kind::Write, 0..8);
        history.end(&first, 8);
        let begun = history.clock.begin_call(0);
        for _ in 0..100 {
            let change = history.begin("write", 0, Kind::Write, 0..8);
            history.end(&change, 8);
        }
        assert!(history.check("read", &bytes(&first, 0), 0, begun).is_ok());
        history.clock.end_call(0);
        for _ in 0..100 {
            let change = history.begin("write", 0, Kind::Write, 0..8);
            history.end(&change, 8);
        }
        assert!(history.page(0).len() < 40, "{} changes are kept", history.page(0).len());
    }
}
