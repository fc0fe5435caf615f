//! The words that describe a page and its folio: the pin word of a descriptor, which counts
//! references and can refuse new ones; its flags, with the write state; and the Entry of a page.
//!
//! # The pin word
//! ```text
//!   63          40  39      38                                   0
//!  +--------------+--------+---------------------------------------+
//!  |  generation  | FROZEN |                 count                 |
//!  +--------------+--------+---------------------------------------+
//!
//!  FROZEN  count   meaning
//!    0      n > 0  live, n references
//!    0      0      staged for freeing: the last reference was put; a `try_get` may still rescue it
//!    1      0      free, or frozen by the thread that owns every reference
//!    1      k      as above, with k failed `try_get` in flight or not yet wiped
//! ```
//!
//! PROTOCOL PIN, as two columns (A takes references, B ends the generation):
//!
//! ```text
//!  A: get, put                                B: freeze, free, reuse
//!  A1 fetch_add(n)                            B1 CAS (g, expected) -> (g, FROZEN)    freeze
//!  A2 FROZEN clear in the result: got it      B2 read what only an owner may see
//!  A3 else: while the word is (g, FROZEN, k)  B3 store (g, n)                        unfreeze, or
//!     CAS -> (g, FROZEN, 0); then give up     B4 ... free, and much later
//!  A4 put: fetch_sub(n); was it the last?     B5 store (g + 1, n)                    init
//!  A5 CAS (g, 0) -> (g, FROZEN); the winner,
//!     and only it, frees
//! ```
//!
//! - PIN-1: exactly one thread wins A5 or B1 for a generation and does not unfreeze; it frees.
//! - PIN-2: a failed `try_get` never subtracts: B3 or B5 may have wiped its add. A3 keeps abandoned
//!   adds from ever carrying out of the count.
//! - PIN-3: FROZEN is cleared only by B3 (same generation) and B5 (next generation). So a put that
//!   paused between A4 and A5 while the folio was freed and reused fails its CAS.
//! - PIN-4: while the word is frozen, no owner is left that could put: B1 succeeds only if
//!   `expected` counts all references.
//! - PIN-5: a count never exceeds [`COUNT_MAX`], half the field: it can never carry into FROZEN.
//!
//! Orderings: A2, B1 and A5 acquire (accesses to the folio follow), A4, B3 and B5 release (changes
//! to the folio precede). With a relaxed A5 the winner would free while the accesses of a thread
//! that got and put in between are still unordered (loom: `pin_r2`).
//!
//! The generation has 24 bits: A5 is fooled only if its thread sleeps through 2^24 generations of
//! one frame (more than 16 s, at a microsecond each) and wakes when the count is exactly 0, which
//! lasts for two instructions per generation.
//!
//! Length: half of it is comments about the protocols of the three words.

use crate::sync::{AtomicU32, AtomicU64, Ordering, blocking, store_owned, waiters};
use std::ops::Range;
use std::task::Waker;

const COUNT_BITS: u32 = 39;
const GENERATION_BITS: u32 = 24;
const FROZEN: u64 = 1 << COUNT_BITS;
const COUNT_MASK: u64 = FROZEN - 1;
const GENERATION_SHIFT: u32 = COUNT_BITS + 1;
const _: () = assert!(COUNT_BITS + 1 + GENERATION_BITS == u64::BITS);

pub(crate) const COUNT_MAX: u64 = COUNT_MASK >> 1;
/// Bits that are set in the result of an add that found FROZEN or exceeded the limit.
const NOT_GOT: u64 = FROZEN | (COUNT_MAX + 1);

/// The state of a pin word at one moment: the decisions of the protocol without the atomics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PinState(pub(crate) u64);

impl PinState {
    pub(crate) fn live(generation: u64, count: u64) -> Self {
        debug_assert!(count <= COUNT_MAX, "{count} references");
        Self((generation << GENERATION_SHIFT) | count)
    }

    pub(crate) fn frozen(generation: u64) -> Self {
        Self((generation << GENERATION_SHIFT) | FROZEN)
    }

    pub(crate) fn generation(self) -> u64 {
        self.0 >> GENERATION_SHIFT
    }

    pub(crate) fn is_frozen(self) -> bool {
        self.0 & FROZEN != 0
    }

    /// References held; 0 while frozen, whatever failed gets left in the field.
    pub(crate) fn count(self) -> u64 {
        if self.is_frozen() { 0 } else { self.0 & COUNT_MASK }
    }

    #[inline(always)]
    pub(crate) fn is_got(self) -> bool {
        self.0 & NOT_GOT == 0
    }

    /// Returns the word that a failed get writes to wipe its add (A3); `None` if the word was
    /// unfrozen, reused or wiped since.
    pub(crate) fn wiped(self, generation: u64) -> Option<Self> {
        let clean = Self::frozen(generation);
        let is_its = self.is_frozen() && self.generation() == generation;
        (is_its && self != clean).then_some(clean)
    }
}

#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TryGet {
    Got,
    /// The folio is frozen or free: look it up again.
    Frozen,
    /// The count would pass [`COUNT_MAX`].
    Refused,
}

#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Put {
    /// Other references exist, or another thread frees the folio. It may be freed at any moment.
    Done,
    /// The caller put the last reference, and must free the folio, which is frozen.
    Last,
}

#[derive(Debug, Default)]
pub(crate) struct PinWord(AtomicU64);

impl PinWord {
    pub(crate) fn state(&self) -> PinState {
        // Relaxed: a hint; a caller that acts on it does so through a read-modify-write.
        PinState(self.0.load(Ordering::Relaxed))
    }

    /// Makes fresh, zeroed memory a free descriptor. No other thread knows the word yet.
    pub(crate) fn init_free(&self) {
        self.0.store(PinState::frozen(0).0, Ordering::Relaxed);
    }

    /// Takes `references` references unless the folio is frozen (A1..A3).
    #[inline(always)]
    pub(crate) fn try_get(&self, references: u64) -> TryGet {
        // Acquire: pairs with the Release in `unfreeze` and `init`; after it this thread sees what
        // the owner did to the folio while it was frozen or being set up.
        let before = self.0.fetch_add(references, Ordering::Acquire);
        let after = PinState(before.wrapping_add(references));
        if after.is_got() { TryGet::Got } else { self.try_get_cold(after, references) }
    }

    #[cold]
    fn try_get_cold(&self, after: PinState, references: u64) -> TryGet {
        if !after.is_frozen() {
            // Over the limit, but the references are counted: put them. If all COUNT_MAX others
            // were put in this instant, the folio leaks, frozen.
            let put = self.put_and_test(references);
            debug_assert_eq!(put, Put::Done);
            return TryGet::Refused;
        }
        let mut current = after;
        while let Some(wiped) = current.wiped(after.generation()) {
            // Relaxed: nothing is published or read through a word that refused the reference.
            let exchange = (Ordering::Relaxed, Ordering::Relaxed);
            match self.0.compare_exchange(current.0, wiped.0, exchange.0, exchange.1) {
                Ok(_) => break,
                Err(now) => current = PinState(now),
            }
        }
        TryGet::Frozen
    }

    /// The compare-and-swap variant that the pin word replaces, for comparison.
    #[inline(always)]
    pub(crate) fn try_get_compare_exchange(&self, references: u64) -> TryGet {
        let next = |current: u64| {
            let next = PinState(current.wrapping_add(references));
            next.is_got().then_some(next.0)
        };
        // Acquire: pairs as in `try_get`.
        match self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, next) {
            Ok(_) => TryGet::Got,
            Err(now) if PinState(now).is_frozen() => TryGet::Frozen,
            Err(_) => TryGet::Refused,
        }
    }

    /// Puts `references` references; the caller of the last put must free (A4, A5).
    #[inline(always)]
    pub(crate) fn put_and_test(&self, references: u64) -> Put {
        // Release: pairs with the Acquire of the CAS in `put_cold` and in `try_freeze`; the thread
        // that frees or freezes sees everything this thread did with the folio.
        let before = PinState(self.0.fetch_sub(references, Ordering::Release));
        // In a forked child, where the descriptors are zeros, a put does nothing.
        let is_wiped = before.0.wrapping_neg() <= COUNT_MAX;
        let has_enough = before.count() >= references || is_wiped;
        debug_assert!(has_enough, "put of {references} on {before:?}");
        if before.0 & COUNT_MASK == references { self.put_cold(before) } else { Put::Done }
    }

    #[cold]
    fn put_cold(&self, before: PinState) -> Put {
        let staged = PinState::live(before.generation(), 0);
        let frozen = PinState::frozen(before.generation());
        // Acquire: pairs with the Release of every earlier put; the caller is about to free. On
        // failure, Relaxed: another thread rescued or freed the folio, and nothing is read.
        match self.0.compare_exchange(staged.0, frozen.0, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Put::Last,
            Err(_) => Put::Done,
        }
    }

    /// Freezes the folio if the caller's `expected` references are the only ones (B1).
    #[must_use]
    pub(crate) fn try_freeze(&self, expected: u64) -> bool {
        let current = self.state();
        let wanted = PinState::live(current.generation(), expected);
        if current != wanted {
            return false;
        }
        let frozen = PinState::frozen(current.generation());
        // Acquire: pairs with the Release of the puts that reduced the count to `expected`: what
        // those holders did (above all, dirtying the folio) is seen by the tests that follow.
        self.0.compare_exchange(wanted.0, frozen.0, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Ends a freeze, in the same generation (B3).
    pub(crate) fn unfreeze(&self, references: u64) {
        let state = self.state();
        debug_assert!(state.is_frozen() && references > 0, "unfreeze({references}) of {state:?}");
        let live = PinState::live(state.generation(), references);
        // Release: pairs with the Acquire in `try_get`: a getter sees what was done while frozen.
        store_owned(&self.0, live.0, Ordering::Release);
    }

    /// Starts the next generation with `references` references (B5).
    pub(crate) fn init(&self, references: u64) {
        let state = self.state();
        debug_assert!(state.is_frozen() && references > 0, "init({references}) of {state:?}");
        let generation = (state.generation() + 1) & ((1 << GENERATION_BITS) - 1);
        let live = PinState::live(generation, references);
        // Release: pairs with the Acquire in `try_get`: a getter sees the folio set up.
        store_owned(&self.0, live.0, Ordering::Release);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Flag {
    /// The bytes are those of the file.
    Uptodate = 1 << 0,
    /// A thread sleeps until the write-out ends. Bits 1 and 2 are the [`WriteState`].
    WritebackWaiters = 1 << 3,
    OnLru = 1 << 4,
    /// The folio is on ACTIVE, isolated from it, or about to be added to it.
    Active = 1 << 5,
    /// The folio is on FRESH, or isolated from it.
    Fresh = 1 << 6,
    /// The folio was read ahead and not used since.
    Readahead = 1 << 7,
    /// Reserved by `allocate` and never written: reads return zeros, whatever its frame holds.
    Allocated = 1 << 8,
    /// Never on an LRU list: the folio cannot be reclaimed.
    Unlisted = 1 << 9,
    /// The folio was filled while its pages were being cleared: zeros, and later writes.
    Punched = 1 << 10,
}

/// Mask of the write state: on the dirty list, and on the way to the device.
const STATE: u32 = LISTED | IN_FLIGHT;
const LISTED: u32 = 1 << 1;
const IN_FLIGHT: u32 = 1 << 2;

/// Relation between the bytes of a folio and those on the device.
///
/// A transition is one read-modify-write, named after the resulting state. It returns how the
/// caller, which holds the lock of the dirty list (WRITEBACK-1), must update that list:
///
/// ```text
///              to_dirty: Add             to_writing: Remove
///   Clean -----------------------> Dirty --------------------> Writing -- to_written --> Clean
///     ^------ to_clean: Remove ------'^                         |   |
///                                     |---- to_unwritten: Add --'   | to_dirty: Add
///                                     |                             v
///                                     '-- to_written, to_unwritten: Keep -- Redirtied
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum WriteState {
    /// The device needs no write: it has the bytes, or they were discarded.
    Clean = 0,
    /// The folio is newer than the device, and on the dirty list of its file.
    Dirty = LISTED,
    Writing = IN_FLIGHT,
    /// The folio was changed during its write-out, and is on the dirty list again.
    Redirtied = LISTED | IN_FLIGHT,
}

impl WriteState {
    fn of(word: u32) -> Self {
        match word & STATE {
            LISTED => Self::Dirty,
            IN_FLIGHT => Self::Writing,
            STATE => Self::Redirtied,
            _ => Self::Clean,
        }
    }

    pub(crate) fn is_dirty(self) -> bool {
        self as u32 & LISTED != 0
    }

    pub(crate) fn is_writing(self) -> bool {
        self as u32 & IN_FLIGHT != 0
    }
}

/// The change that the caller must make to the dirty list before it unlocks the list.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listing {
    Add,
    Remove,
    Keep,
}

/// The flags of a folio, independent bits, and the [`WriteState`]. All changes are
/// read-modify-writes, so bits guarded by different locks (rules 3 and 5 of `page/mod.rs`) can
/// share the word. A thread that waits for write-back to end sleeps on it, or leaves a waker.
#[derive(Debug, Default)]
pub(crate) struct Flags(AtomicU32);

impl Flags {
    pub(crate) fn get(&self, flag: Flag) -> bool {
        // Acquire: pairs with the Release in `set`: a thread that sees UPTODATE sees the bytes.
        self.0.load(Ordering::Acquire) & flag as u32 != 0
    }

    /// Sets the bit. Returns `true` if it was clear.
    pub(crate) fn set(&self, flag: Flag) -> bool {
        // Release: pairs with the Acquire in `get`.
        self.0.fetch_or(flag as u32, Ordering::Release) & flag as u32 == 0
    }

    pub(crate) fn clear(&self, flag: Flag) -> bool {
        // Release: pairs with the Acquire in `get`.
        self.0.fetch_and(!(flag as u32), Ordering::Release) & flag as u32 != 0
    }

    /// Sets or clears the bit; writes nothing if it has that value. No other thread changes it.
    pub(crate) fn assign(&self, flag: Flag, value: bool) {
        if self.get(flag) != value {
            let _ = if value { self.set(flag) } else { self.clear(flag) };
        }
    }

    pub(crate) fn reset(&self) {
        // Release: pairs with the Acquire in `get` and in `Mapping::peek`: a thread that sees the
        // flags of this generation sees that the previous folio was removed from its table.
        self.0.store(0, Ordering::Release);
    }

    pub(crate) fn write_state(&self) -> WriteState {
        // Acquire: pairs with the Release in `change`: a thread that sees no write-out in flight
        // sees the I/O done.
        WriteState::of(self.0.load(Ordering::Acquire))
    }

    pub(crate) fn transition_to_dirty(&self) -> Listing {
        self.change(|state| state | LISTED)
    }

    /// Discards the difference to the device without a write-out.
    pub(crate) fn transition_to_clean(&self) -> Listing {
        self.change(|state| state & !LISTED)
    }

    /// Begins a write-out if the folio is dirty and no write-out is in flight; otherwise changes
    /// nothing.
    pub(crate) fn transition_to_writing(&self) -> Listing {
        self.change(|state| if state == LISTED { IN_FLIGHT } else { state })
    }

    pub(crate) fn transition_to_written(&self) -> Listing {
        self.change(|state| state & !IN_FLIGHT)
    }

    pub(crate) fn transition_to_unwritten(&self) -> Listing {
        self.change(|state| state & !IN_FLIGHT | LISTED)
    }

    /// Changes the state in one step. If that ends a write-out, wakes the threads that wait for it.
    fn change(&self, next: impl Fn(u32) -> u32) -> Listing {
        let after_of = |before: u32| {
            let after = before & !STATE | next(before & STATE);
            let is_over = after & IN_FLIGHT == 0;
            if is_over { after & !(Flag::WritebackWaiters as u32) } else { after }
        };
        // AcqRel: its Release pairs with the Acquire in `write_state` and in `wait_for_writeback`:
        // the I/O is done, or the folio set up. Its Acquire pairs with the Release in
        // `is_written_or_wake`: this thread finds the waker. On failure, Relaxed: only the value
        // counts.
        let exchange = (Ordering::AcqRel, Ordering::Relaxed);
        let changed = |before| Some(after_of(before));
        let (Ok(before) | Err(before)) = self.0.fetch_update(exchange.0, exchange.1, changed);
        let after = after_of(before);
        if before & !after & Flag::WritebackWaiters as u32 != 0 {
            waiters::wake_sleepers(&self.0, u32::MAX >> 1);
            waiters::call_wakers(&self.0);
        }
        match (before & LISTED, after & LISTED) {
            (0, LISTED) => Listing::Add,
            (LISTED, 0) => Listing::Remove,
            _ => Listing::Keep,
        }
    }

    pub(crate) fn wait_for_writeback(&self) {
        blocking::check("the end of a write-out");
        loop {
            // Acquire: pairs with the Release in `change`.
            let now = self.0.load(Ordering::Acquire);
            if now & IN_FLIGHT == 0 {
                return;
            }
            let waiting = now | Flag::WritebackWaiters as u32;
            // Relaxed: the waiters bit publishes nothing.
            let relaxed = (Ordering::Relaxed, Ordering::Relaxed);
            if self.0.compare_exchange(now, waiting, relaxed.0, relaxed.1).is_ok() {
                waiters::sleep(&self.0, waiting);
            }
        }
    }

    /// Returns `true` if no write-out is in flight. Otherwise `waker` is called when the one in
    /// flight has ended, or before.
    pub(crate) fn is_written_or_wake(&self, waker: Waker) -> bool {
        let data = waker.data();
        waiters::register(&self.0, waker);
        let add_waiter =
            |now: u32| (now & IN_FLIGHT != 0).then_some(now | Flag::WritebackWaiters as u32);
        // Release: pairs with the Acquire in `change`, which then finds the waker. On failure,
        // Acquire: pairs with the Release in `change`, as in `wait_for_writeback`.
        let exchange = (Ordering::Release, Ordering::Acquire);
        let is_written = self.0.fetch_update(exchange.0, exchange.1, add_waiter).is_err();
        if is_written {
            self.forget_waker(data);
        }
        is_written
    }

    /// Forgets the wakers with data at `data` that wait for the end of a write-out.
    pub(crate) fn forget_waker(&self, data: *const ()) {
        waiters::forget(&self.0, data);
    }
}

pub(crate) const PAGE_SHIFT: u32 = 12;
/// Bytes of a page: what an Entry stands for, and the smallest folio.
pub(crate) const PAGE_BYTES: u64 = 1 << PAGE_SHIFT;

/// The range of a call that is for a whole file.
pub(crate) const ALL_BYTES: Range<u64> = 0..u64::MAX;

pub(crate) fn pages_of(range: &Range<u64>) -> Range<u64> {
    range.start >> PAGE_SHIFT..range.end.div_ceil(PAGE_BYTES)
}

/// Returns `true` if the bytes lie in one page: reads and writes of it are atomic.
#[inline(always)]
pub(crate) fn is_in_one_page(position: u64, length: u64) -> bool {
    (position & (PAGE_BYTES - 1)) + length <= PAGE_BYTES
}

const KIND_MASK: u64 = 0b11;
const KIND_FOLIO: u64 = 0b01;
const KIND_VALUE: u64 = 0b10;
const READY: u64 = 1 << 2;
const REFERENCED: u64 = 1 << 3;
const ORDER_SHIFT: u32 = 4;
const ORDER_MASK: u64 = 0xF;
const VERSION_SHIFT: u32 = 8;
const VERSION_BITS: u32 = 24;
const VERSION_MASK: u64 = (1 << VERSION_BITS) - 1;
const FRAME_SHIFT: u32 = 32;
const VALUE_SHIFT: u32 = 4;
const _: () = assert!(VERSION_SHIFT + VERSION_BITS == FRAME_SHIFT);

pub(crate) const VALUE_MAX: u64 = (1 << (FRAME_SHIFT - VALUE_SHIFT)) - 1;

/// Id of a folio: the number of its first frame and of its descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct FolioId(pub(crate) u32);

/// The word that describes one page of a file in a table. A pure value: the rules for storing it
/// are in `mapping.rs`.
///
/// ```text
///   63            32 31          8 7     4      3        2     1  0
///  +----------------+-------------+-------+------------+-------+----+
///  |    frame id    |   version   | order | REFERENCED | READY | 01 |   folio
///  +----------------+-------------+-------+------------+-------+----+
///  |       0        |   value (28 bits)   |     0      |   0   | 10 |   value
///  +----------------+---------------------+------------+-------+----+
///  |                            0                              | 00 |   hole
///  +-----------------------------------------------------------+----+
/// ```
///
/// The frame id is that of the page's own frame. Frames of a folio are naturally aligned, so the
/// folio (its first frame) is the id rounded down to the order.
///
/// ENTRY-1: a hole and a value have frame id 0, so the frame of every Entry is in the arena: an
/// optimistic read may load from it before it knows the kind of the Entry.
/// ENTRY-2: REFERENCED implies READY, and READY implies a folio: a hit tests one bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry(pub(crate) u64);

impl Entry {
    /// No information about the page: its bytes, if any, are on the backing.
    pub(crate) const HOLE: Entry = Entry(0);

    /// Returns the Entry of a page in `frame`, of a folio of `order`, without marks.
    pub(crate) fn folio(frame: u32, version: u32, order: u8) -> Self {
        let version = (u64::from(version) & VERSION_MASK) << VERSION_SHIFT;
        let order = u64::from(order) << ORDER_SHIFT;
        Self((u64::from(frame) << FRAME_SHIFT) | version | order | KIND_FOLIO)
    }

    pub(crate) fn value(value: u64) -> Self {
        debug_assert!(value <= VALUE_MAX, "value {value:#x}");
        Self((value << VALUE_SHIFT) | KIND_VALUE)
    }

    pub(crate) fn is_folio(self) -> bool {
        self.0 & KIND_MASK == KIND_FOLIO
    }

    pub(crate) fn as_value(self) -> Option<u64> {
        (self.0 & KIND_MASK == KIND_VALUE).then_some(self.0 >> VALUE_SHIFT)
    }

    #[inline(always)]
    pub(crate) fn is_ready(self) -> bool {
        self.0 & (KIND_MASK | READY) == KIND_FOLIO | READY
    }

    /// Returns `true` if the page is READY and marked for the replacement policy (ENTRY-2).
    #[inline(always)]
    pub(crate) fn is_referenced(self) -> bool {
        self.0 & REFERENCED != 0
    }

    /// Byte offset of the page in the frames: frame id times the page size.
    #[inline(always)]
    pub(crate) fn frame_offset_bytes(self) -> usize {
        let page_mask = !((1 << PAGE_SHIFT) - 1);
        ((self.0 >> (FRAME_SHIFT - PAGE_SHIFT)) & page_mask) as usize
    }

    pub(crate) fn frame(self) -> u32 {
        (self.0 >> FRAME_SHIFT) as u32
    }

    pub(crate) fn order(self) -> u8 {
        ((self.0 >> ORDER_SHIFT) & ORDER_MASK) as u8
    }

    pub(crate) fn version(self) -> u32 {
        ((self.0 >> VERSION_SHIFT) & VERSION_MASK) as u32
    }

    #[inline(always)]
    pub(crate) fn folio_id(self) -> FolioId {
        FolioId(self.frame() >> self.order() << self.order())
    }

    /// Returns `true` if both name the same frame, whatever the version and the marks.
    #[inline(always)]
    pub(crate) fn names_same_folio(self, other: Entry) -> bool {
        let ignored = (VERSION_MASK << VERSION_SHIFT) | READY | REFERENCED;
        (self.0 ^ other.0) & !ignored == 0
    }

    /// Returns `true` if both name the same frame and are READY, whatever the version and the mark.
    /// `other` must be READY.
    #[inline(always)]
    pub(crate) fn names_same_ready_folio(self, other: Entry) -> bool {
        let ignored = (VERSION_MASK << VERSION_SHIFT) | REFERENCED;
        (self.0 ^ other.0) & !ignored == 0
    }

    /// Returns `true` if at most the mark differs: the bytes are the same.
    #[inline(always)]
    pub(crate) fn is_same_version(self, other: Entry) -> bool {
        (self.0 ^ other.0) & !REFERENCED == 0
    }

    pub(crate) fn with_ready(self) -> Self {
        debug_assert!(self.is_folio());
        Self(self.0 | READY)
    }

    pub(crate) fn without_ready(self) -> Self {
        Self(self.0 & !(READY | REFERENCED))
    }

    pub(crate) fn with_referenced(self) -> Self {
        debug_assert!(self.is_ready());
        Self(self.0 | REFERENCED)
    }

    pub(crate) fn without_referenced(self) -> Self {
        Self(self.0 & !REFERENCED)
    }

    pub(crate) fn with_next_version(self) -> Self {
        let version = u64::from(self.version().wrapping_add(1)) & VERSION_MASK;
        Self((self.0 & !(VERSION_MASK << VERSION_SHIFT)) | (version << VERSION_SHIFT))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn live(references: u64) -> PinWord {
        let word = PinWord::default();
        word.init_free();
        word.init(references);
        word
    }

    #[test]
    fn a_count_at_the_limit_is_refused_and_unchanged() {
        let word = live(COUNT_MAX);
        assert_eq!(word.try_get(1), TryGet::Refused);
        assert_eq!(word.state().count(), COUNT_MAX);
        assert_eq!(word.put_and_test(1), Put::Done);
        assert_eq!(word.try_get(1), TryGet::Got);
    }

    #[test]
    fn a_failed_get_leaves_no_trace() {
        let word = live(1);
        assert!(word.try_freeze(1));
        let frozen = word.state();
        assert_eq!(word.try_get(3), TryGet::Frozen);
        assert_eq!(word.state(), frozen);
        assert_eq!(frozen.count(), 0);
    }

    #[test]
    fn freezing_needs_every_reference() {
        let word = live(2);
        assert!(!word.try_freeze(1));
        assert!(!word.try_freeze(3));
        assert!(word.try_freeze(2));
        assert!(!word.try_freeze(2));
        word.unfreeze(2);
        assert_eq!(word.state().count(), 2);
    }

    #[test]
    fn the_last_put_freezes_and_the_next_init_is_a_new_generation() {
        let word = live(2);
        let generation = word.state().generation();
        assert_eq!(word.put_and_test(1), Put::Done);
        assert_eq!(word.put_and_test(1), Put::Last);
        assert!(word.state().is_frozen());
        word.init(1);
        assert_eq!(word.state().generation(), generation + 1);
    }

    #[test]
    fn the_generation_wraps_to_zero() {
        let word = live(1);
        word.0.store(PinState::frozen((1 << GENERATION_BITS) - 1).0, Ordering::Relaxed);
        word.init(1);
        assert_eq!(word.state(), PinState::live(0, 1));
    }

    /// Lists for each state the result of each transition.
    #[test]
    fn every_transition_leads_where_its_name_says() {
        use Listing::{Add, Keep, Remove};
        use WriteState::{Clean, Dirty, Redirtied, Writing};
        type Transition = fn(&Flags) -> Listing;
        let table: [(Transition, [(WriteState, Listing); 4]); 5] = [
            (
                Flags::transition_to_dirty,
                [(Dirty, Add), (Dirty, Keep), (Redirtied, Add), (Redirtied, Keep)],
            ),
            (
                Flags::transition_to_clean,
                [(Clean, Keep), (Clean, Remove), (Writing, Keep), (Writing, Remove)],
            ),
            (
                Flags::transition_to_writing,
                [(Clean, Keep), (Writing, Remove), (Writing, Keep), (Redirtied, Keep)],
            ),
            (
                Flags::transition_to_written,
                [(Clean, Keep), (Dirty, Keep), (Clean, Keep), (Dirty, Keep)],
            ),
            (
                Flags::transition_to_unwritten,
                [(Dirty, Add), (Dirty, Keep), (Dirty, Add), (Dirty, Keep)],
            ),
        ];
        for (transition, outcomes) in table {
            for (from, (to, listing)) in
                [Clean, Dirty, Writing, Redirtied].into_iter().zip(outcomes)
            {
                let others = Flag::Uptodate as u32 | Flag::OnLru as u32;
                let flags = Flags(AtomicU32::new(others | from as u32));
                assert_eq!((transition(&flags), flags.write_state()), (listing, to), "{from:?}");
                assert!(flags.get(Flag::Uptodate) && flags.get(Flag::OnLru));
            }
        }
    }

    #[test]
    fn fields_do_not_overlap() {
        for frame in [0, 1, 511, 512, u32::MAX] {
            for version in [0, 1, (1 << 24) - 1] {
                for order in 0..=9 {
                    let entry = Entry::folio(frame, version, order);
                    assert!(entry.is_folio() && !entry.is_ready() && entry.as_value().is_none());
                    let marked = entry.with_ready().with_referenced();
                    for entry in [entry, marked, entry.with_next_version()] {
                        assert_eq!((entry.frame(), entry.order()), (frame, order));
                        assert_eq!(entry.frame_offset_bytes(), frame as usize * 4096);
                        assert!(entry.names_same_folio(marked));
                    }
                    assert_eq!(marked.version(), version);
                    assert_eq!(entry.with_next_version().version(), (version + 1) & 0xFF_FFFF);
                    assert!(marked.is_referenced() && marked.is_ready());
                    assert_eq!(marked.without_referenced(), entry.with_ready());
                    assert_eq!(marked.without_ready(), entry);
                }
            }
        }
    }

    #[test]
    fn a_value_is_neither_a_folio_nor_a_hole() {
        for value in [0, 1, VALUE_MAX] {
            let entry = Entry::value(value);
            assert_eq!(entry.as_value(), Some(value));
            assert!(!entry.is_folio() && !entry.is_ready() && entry != Entry::HOLE);
            assert!(!entry.is_referenced(), "ENTRY-2");
            assert_eq!(entry.frame_offset_bytes(), 0, "ENTRY-1");
        }
        assert!(!Entry::HOLE.is_folio() && Entry::HOLE.as_value().is_none());
        assert_eq!(Entry::HOLE.frame_offset_bytes(), 0);
    }

    #[test]
    fn the_folio_of_a_page_is_its_first_frame() {
        assert_eq!(Entry::folio(517, 3, 2).folio_id(), FolioId(516));
        assert_eq!(Entry::folio(517, 3, 0).folio_id(), FolioId(517));
        assert_eq!(Entry::folio(1023, 3, 9).folio_id(), FolioId(512));
    }
}
