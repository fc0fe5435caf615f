//! Storage whose n-th call goes wrong, over any other storage.
//!
//! A test keeps an `Arc<FaultyBacking>`, hands a clone to the cache, and injects faults when the
//! time has come. Calls are counted from the moment a fault is injected; a fault strikes a given
//! number of times and is then spent. What no fault strikes goes through untouched.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use bifolio::{Alignment, Backing, DirectStatus, FileIdentity, IoSource, IoTarget};

use crate::Gate;

/// A call of a backing that can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// `read_at`.
    Read,
    /// `write_at`.
    Write,
    /// `sync_data`.
    SyncData,
    /// `sync_all`.
    SyncAll,
    /// `len_bytes`.
    Len,
    /// `set_len`.
    SetLen,
}

const CALLS: usize = 6;

/// What goes wrong, when, and how often.
///
/// ```
/// use bifolio_testing::{Call, Fault};
/// let third_write_is_too_much = Fault::on(Call::Write).nth(3).fails(libc::ENOSPC);
/// let bad_sector = Fault::on(Call::Read).at(8192..8704).forever().fails(libc::EIO);
/// let interrupted_twice = Fault::on(Call::Read).times(2).fails(libc::EINTR);
/// # drop((third_write_is_too_much, bad_sector, interrupted_twice));
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Fault {
    call: Call,
    bytes: Range<u64>,
    skipped: u64,
    times: u64,
    effect: Effect,
}

#[derive(Clone, Debug)]
enum Effect {
    Fail(i32),
    Short(usize),
    Delay(Duration),
    Hold(Gate),
}

impl Fault {
    /// Strikes the next call of this kind, once, with EIO, unless told otherwise.
    pub fn on(call: Call) -> Self {
        let effect = Effect::Fail(libc::EIO);
        Self { call, bytes: 0..u64::MAX, skipped: 0, times: 1, effect }
    }

    /// Only transfers that touch `bytes` count. Calls without bytes touch none.
    pub fn at(self, bytes: Range<u64>) -> Self {
        Self { bytes, ..self }
    }

    /// Begins with the `n`-th call that counts, 1 being the next.
    pub fn nth(self, n: u64) -> Self {
        assert!(n > 0, "the first call is number 1");
        Self { skipped: n - 1, ..self }
    }

    /// Strikes so many calls in a row.
    pub fn times(self, times: u64) -> Self {
        Self { times, ..self }
    }

    /// Strikes every call from then on.
    pub fn forever(self) -> Self {
        self.times(u64::MAX)
    }

    /// The call does nothing and answers `errno`.
    pub fn fails(self, errno: i32) -> Self {
        Self { effect: Effect::Fail(errno), ..self }
    }

    /// The transfer is `bytes` bytes shorter than asked, but moves at least one byte; a write that
    /// is to be whole blocks for the storage below moves whole blocks, at least one.
    pub fn short_by(self, bytes: usize) -> Self {
        Self { effect: Effect::Short(bytes), ..self }
    }

    /// The transfer succeeds with 0 bytes: for a read that means the end of the file.
    pub fn moves_nothing(self) -> Self {
        self.short_by(usize::MAX)
    }

    /// The call takes so much longer.
    pub fn delayed(self, delay: Duration) -> Self {
        Self { effect: Effect::Delay(delay), ..self }
    }

    /// The call waits at `gate` before it does anything.
    pub fn held(self, gate: &Gate) -> Self {
        Self { effect: Effect::Hold(gate.clone()), ..self }
    }

    /// Counts a call; whether the fault strikes it.
    fn strikes(&mut self, call: Call, bytes: &Range<u64>) -> bool {
        let everywhere = self.bytes == (0..u64::MAX);
        let touches = bytes.start < self.bytes.end && self.bytes.start < bytes.end;
        if call != self.call || !(everywhere || touches) || self.times == 0 {
            return false;
        }
        if self.skipped > 0 {
            self.skipped -= 1;
            return false;
        }
        if self.times != u64::MAX {
            self.times -= 1;
        }
        true
    }
}

/// Storage that goes wrong on command.
#[derive(Debug)]
pub struct FaultyBacking {
    inner: Arc<dyn Backing>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    faults: Vec<Fault>,
    calls: [u64; CALLS],
    struck: u64,
}

impl FaultyBacking {
    /// Everything works as in `inner`, for now.
    pub fn new(inner: impl Backing + 'static) -> Self {
        Self::over(Arc::new(inner))
    }

    /// As [`new`](Self::new), over storage that the test keeps a hand on.
    pub fn over(inner: Arc<dyn Backing>) -> Self {
        Self { inner, state: Mutex::default() }
    }

    /// Adds a fault. Several may strike one call: it waits for all, then fails with the first.
    pub fn inject(&self, fault: Fault) {
        self.state().faults.push(fault);
    }

    /// Takes every fault back.
    pub fn heal(&self) {
        self.state().faults.clear();
    }

    /// How often `call` was made, faults included.
    pub fn calls(&self, call: Call) -> u64 {
        self.state().calls[call as usize]
    }

    /// How often a fault has struck.
    pub fn struck(&self) -> u64 {
        self.state().struck
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }

    /// Makes a call wait or fail as the faults want; how many bytes shorter it is to be.
    fn suffer(&self, call: Call, bytes: Range<u64>) -> io::Result<usize> {
        let mut failure = None;
        let mut short = 0;
        for effect in self.effects(call, &bytes) {
            match effect {
                Effect::Fail(errno) => failure = failure.or(Some(errno)),
                Effect::Short(bytes) => short = short.max(bytes),
                Effect::Delay(delay) => thread::sleep(delay),
                Effect::Hold(gate) => gate.pass(),
            }
        }
        failure.map_or(Ok(short), |errno| Err(io::Error::from_raw_os_error(errno)))
    }

    /// Counts the call; what strikes it. Nobody waits under the lock.
    fn effects(&self, call: Call, bytes: &Range<u64>) -> Vec<Effect> {
        let mut state = self.state();
        state.calls[call as usize] += 1;
        let struck = state.faults.iter_mut().filter_map(|fault| {
            let strikes = fault.strikes(call, bytes);
            strikes.then(|| fault.effect.clone())
        });
        let effects: Vec<_> = struck.collect();
        state.struck += effects.len() as u64;
        effects
    }
}

impl Backing for FaultyBacking {
    fn read_at(&self, target: &mut IoTarget<'_>, position_bytes: u64) -> io::Result<usize> {
        let length = target.len();
        let short = self.suffer(Call::Read, range(position_bytes, length))?;
        let count = self.inner.read_at(target, position_bytes)?;
        Ok(count.min(shortened(length, short, 1)))
    }

    fn write_at(&self, source: &IoSource<'_>, position_bytes: u64) -> io::Result<usize> {
        let short = self.suffer(Call::Write, range(position_bytes, source.len()))?;
        let block = self.inner.alignment().offset_bytes as usize;
        let length = shortened(source.len(), short, block);
        self.inner.write_at(&source.prefix(length), position_bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.suffer(Call::SyncData, 0..0)?;
        self.inner.sync_data()
    }

    fn sync_all(&self) -> io::Result<()> {
        self.suffer(Call::SyncAll, 0..0)?;
        self.inner.sync_all()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.suffer(Call::Len, 0..0)?;
        self.inner.len_bytes()
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.suffer(Call::SetLen, 0..0)?;
        self.inner.set_len(length_bytes)
    }

    fn alignment(&self) -> Alignment {
        self.inner.alignment()
    }

    fn describe(&self) -> String {
        format!("faulty {}", self.inner.describe())
    }

    fn identity(&self) -> Option<FileIdentity> {
        self.inner.identity()
    }

    fn direct(&self) -> DirectStatus {
        self.inner.direct()
    }
}

/// How much is left of a transfer: whole blocks, at least one of them, or all of a part of one.
fn shortened(length: usize, short: usize, block: usize) -> usize {
    match short {
        0 => length,
        usize::MAX => 0,
        _ => (length.saturating_sub(short) / block * block).max(block.min(length)),
    }
}

fn range(position_bytes: u64, length: usize) -> Range<u64> {
    position_bytes..position_bytes.saturating_add(length as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryBacking;
    use bifolio::IoBuffer;
    use std::time::Instant;

    fn faulty() -> FaultyBacking {
        FaultyBacking::new(MemoryBacking::new((0..100).collect()))
    }

    fn read(backing: &FaultyBacking, position_bytes: u64) -> Result<usize, i32> {
        let mut buffer = IoBuffer::new(10);
        let answer = backing.read_at(&mut buffer.target(), position_bytes);
        answer.map_err(|error| error.raw_os_error().unwrap())
    }

    fn write(backing: &FaultyBacking, position_bytes: u64) -> Result<usize, i32> {
        let answer = backing.write_at(&IoBuffer::from_bytes(&[9; 10]).source(), position_bytes);
        answer.map_err(|error| error.raw_os_error().unwrap())
    }

    #[test]
    fn the_nth_call_and_only_it_is_struck() {
        let backing = faulty();
        read(&backing, 0).unwrap();
        backing.inject(Fault::on(Call::Read).nth(3).fails(libc::ENXIO));
        let answers: Vec<_> = (0..5).map(|_| read(&backing, 0)).collect();
        assert_eq!(answers, [Ok(10), Ok(10), Err(libc::ENXIO), Ok(10), Ok(10)]);
        assert_eq!((backing.calls(Call::Read), backing.struck()), (6, 1));
        assert_eq!(backing.calls(Call::Write), 0);
    }

    #[test]
    fn faults_repeat_as_often_as_told_and_can_be_healed() {
        let backing = faulty();
        backing.inject(Fault::on(Call::Read).times(2).fails(libc::EINTR));
        let answers = [(); 3].map(|()| read(&backing, 0));
        assert_eq!(answers, [Err(libc::EINTR), Err(libc::EINTR), Ok(10)]);
        backing.inject(Fault::on(Call::SyncData).forever());
        backing.inject(Fault::on(Call::SyncAll).nth(2));
        backing.inject(Fault::on(Call::SetLen).fails(libc::ENOSPC));
        backing.inject(Fault::on(Call::Len));
        assert!((0..9).all(|_| backing.sync_data().is_err()));
        assert!(backing.sync_all().is_ok() && backing.sync_all().is_err());
        assert!(backing.set_len(5).is_err() && backing.len_bytes().is_err());
        assert_eq!(backing.len_bytes().unwrap(), 100, "a failed call does nothing");
        backing.heal();
        assert!(backing.sync_data().is_ok());
    }

    #[test]
    fn a_fault_at_a_place_strikes_there_only() {
        let backing = faulty();
        backing.inject(Fault::on(Call::Write).at(20..21).forever().fails(libc::EIO));
        let struck: Vec<u64> = (0..40).filter(|at| write(&backing, *at).is_err()).collect();
        assert_eq!(struck, (11..=20).collect::<Vec<_>>());
        backing.inject(Fault::on(Call::SyncData).at(0..10));
        assert!(backing.sync_data().is_ok(), "a sync touches no bytes");
    }

    #[test]
    fn short_transfers_move_exactly_what_they_claim() {
        let backing = faulty();
        backing.inject(Fault::on(Call::Read).short_by(4));
        backing.inject(Fault::on(Call::Write).short_by(7));
        assert_eq!(read(&backing, 0), Ok(6));
        assert_eq!(write(&backing, 50), Ok(3));
        let mut buffer = IoBuffer::new(100);
        backing.read_at(&mut buffer.target(), 0).unwrap();
        assert_eq!(buffer.as_bytes()[48..55], [48, 49, 9, 9, 9, 53, 54]);
        backing.inject(Fault::on(Call::Read).short_by(1000));
        assert_eq!(read(&backing, 0), Ok(1));
    }

    #[test]
    fn a_short_write_to_blocks_is_whole_blocks() {
        let alignment = Alignment { memory_bytes: 1, offset_bytes: 512 };
        let backing = FaultyBacking::new(MemoryBacking::strict(vec![0; 4096], alignment));
        backing.inject(Fault::on(Call::Write).short_by(600));
        let buffer = IoBuffer::from_bytes(&[1; 2048]);
        assert_eq!(backing.write_at(&buffer.source(), 0).unwrap(), 1024);
    }

    #[test]
    fn a_short_transfer_makes_progress_unless_it_is_to_make_none() {
        assert_eq!(shortened(2048, 600, 512), 1024);
        assert_eq!(shortened(1024, 700, 512), 512, "less than a block is a block");
        assert_eq!(shortened(100, 60, 512), 100, "a part of a block is not cut");
        assert_eq!(shortened(100, 60, 1), 40);
        assert_eq!(shortened(10, 1000, 1), 1);
        assert_eq!(shortened(700, 0, 512), 700);
        let backing = faulty();
        backing.inject(Fault::on(Call::Read).moves_nothing());
        backing.inject(Fault::on(Call::Write).moves_nothing());
        assert_eq!((read(&backing, 0), write(&backing, 0)), (Ok(0), Ok(0)));
        assert_eq!((read(&backing, 0), write(&backing, 0)), (Ok(10), Ok(10)));
    }

    #[test]
    fn delayed_calls_are_late_and_held_calls_wait_for_their_gate() {
        let backing = faulty();
        let delay = Duration::from_millis(30);
        backing.inject(Fault::on(Call::Read).delayed(delay));
        let start = Instant::now();
        read(&backing, 0).unwrap();
        assert!(start.elapsed() >= delay);

        let gate = Gate::new();
        backing.inject(Fault::on(Call::Write).held(&gate));
        backing.inject(Fault::on(Call::Write).fails(libc::EIO));
        thread::scope(|scope| {
            let held = scope.spawn(|| write(&backing, 0));
            gate.wait_for_arrivals(1);
            assert_eq!(read(&backing, 0), Ok(10), "other calls go on");
            gate.open();
            assert_eq!(held.join().unwrap(), Err(libc::EIO));
        });
    }
}
