//! Storage over any other storage, whose n-th call fails.
//!
//! A test keeps an `Arc<FaultyBacking>`, passes a clone to the cache, and injects faults at the
//! right moment. Calls are counted from the injection on; a fault affects a given number of calls
//! and is then spent. All other calls are passed through unchanged.
//!
//! A transfer is made in one of two ways, and counts once in either:
//!
//! ```text
//!   submission: counted; what strikes it is put by --> the kernel --> completed: it strikes
//!        |                                                                |  (the kernel refused)
//!        '-- None, if it is to be late ------------> read_at, write_at: it strikes
//!   not asked: ------------------------------------> read_at, write_at: counted, it strikes
//! ```
//!
//! So transfers are counted in the order in which they start, not in which they complete.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use bifolio::backing::{
    Alignment, Backing, DirectBacking, DirectStatus, FallocateMode, FileIdentity, IoBuf, IoBufMut,
    IoRequest, Operation, Submission,
};

use crate::fault::{CALLS, Call, Effect, Fault};

/// Storage that fails on request.
#[derive(Debug)]
pub struct FaultyBacking {
    inner: Arc<dyn DirectBacking>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    faults: Vec<Fault>,
    calls: [u64; CALLS],
    struck: u64,
    submitted: u64,
    /// Transfers that are counted and not made yet, with their faults.
    started: HashMap<Transfer, Vec<Effect>>,
}

/// One attempt; of two attempts for the same bytes only one is made at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Transfer {
    call: Call,
    position_bytes: u64,
    length_bytes: usize,
}

impl Transfer {
    fn of(request: &IoRequest) -> Self {
        let call = match request.operation {
            Operation::Read => Call::Read,
            Operation::Write => Call::Write,
        };
        let IoRequest { position_bytes, length_bytes, .. } = *request;
        Self { call, position_bytes, length_bytes }
    }

    /// Creates the entry of a call that is no transfer.
    fn none(call: Call) -> Self {
        Self { call, position_bytes: 0, length_bytes: 0 }
    }

    fn bytes(&self) -> Range<u64> {
        self.position_bytes..self.position_bytes.saturating_add(self.length_bytes as u64)
    }
}

impl FaultyBacking {
    /// Creates it over `inner`, without faults.
    pub fn new(inner: impl DirectBacking + 'static) -> Self {
        Self::over(Arc::new(inner))
    }

    /// Creates it like [`new`](Self::new), over storage that the test can access, too.
    pub fn over(inner: Arc<dyn DirectBacking>) -> Self {
        Self { inner, state: Mutex::default() }
    }

    /// Adds a fault. Several may affect one call: it waits for all delays, then fails with the
    /// first error.
    pub fn inject(&self, fault: Fault) {
        self.state().faults.push(fault);
    }

    /// Removes all faults. Those that already affect a transfer in flight stay.
    pub fn heal(&self) {
        self.state().faults.clear();
    }

    /// Returns `true` if a fault may still affect a call.
    pub fn has_faults(&self) -> bool {
        self.state().faults.iter().any(|fault| !fault.is_spent())
    }

    /// Returns how often `call` was made, including failed calls.
    pub fn calls(&self, call: Call) -> u64 {
        self.state().calls[call as usize]
    }

    /// Returns how many calls were affected by faults.
    pub fn struck(&self) -> u64 {
        self.state().struck
    }

    /// Returns how many transfers the cache has submitted itself and seen completed.
    pub fn submitted(&self) -> u64 {
        self.state().submitted
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }

    /// Delays or fails a call according to the faults. Returns how many bytes shorter it is to be.
    /// Does not wait with the lock held.
    fn suffer(&self, transfer: Transfer) -> io::Result<usize> {
        let mut failure = None;
        let mut short = 0;
        let effects = self.state().take(transfer);
        for effect in effects {
            match effect {
                Effect::Fail(errno) => failure = failure.or(Some(errno)),
                Effect::Short(bytes) => short = short.max(bytes),
                Effect::Delay(delay) => thread::sleep(delay),
                Effect::Hold(gate) => gate.pass(),
            }
        }
        failure.map_or(Ok(short), |errno| Err(io::Error::from_raw_os_error(errno)))
    }

    /// Counts a transfer that is about to be made. Returns `true` if the cache may submit it
    /// itself.
    fn may_submit(&self, transfer: Transfer) -> bool {
        let mut state = self.state();
        // Asked again: it was counted.
        let effects = state.started.remove(&transfer).unwrap_or_else(|| state.count(transfer));
        let is_late = effects.iter().any(Effect::is_late);
        state.started.insert(transfer, effects);
        !is_late
    }

    /// Returns the result of a transfer that the kernel has made, from the `answer` of the storage
    /// below.
    fn judge(&self, transfer: Transfer, answer: io::Result<usize>) -> io::Result<usize> {
        self.state().submitted += 1;
        if matches!(&answer, Err(error) if error.kind() == io::ErrorKind::Interrupted) {
            // It is made again, by `*_at`, where it meets what strikes it.
            return answer;
        }
        let short = self.suffer(transfer)?;
        let block = self.block_bytes(transfer.call);
        Ok(answer?.min(shortened(transfer.length_bytes, short, block)))
    }

    /// Returns the unit of a short transfer.
    fn block_bytes(&self, call: Call) -> usize {
        match call {
            Call::Write => self.inner.alignment().offset_bytes as usize,
            _ => 1,
        }
    }
}

impl State {
    /// Returns the effects of faults on a call made now; counts it, if that was not done yet.
    fn take(&mut self, transfer: Transfer) -> Vec<Effect> {
        self.started.remove(&transfer).unwrap_or_else(|| self.count(transfer))
    }

    fn count(&mut self, transfer: Transfer) -> Vec<Effect> {
        self.calls[transfer.call as usize] += 1;
        let struck = self.faults.iter_mut().filter_map(|fault| {
            let strikes = fault.strikes(transfer.call, &transfer.bytes());
            strikes.then(|| fault.effect.clone())
        });
        let effects: Vec<_> = struck.collect();
        self.struck += effects.len() as u64;
        effects
    }
}

impl Backing for FaultyBacking {
    fn read_at(&self, target: &mut IoBufMut<'_>, position_bytes: u64) -> io::Result<usize> {
        self.read_vectored_at(slice::from_mut(target), position_bytes)
    }

    fn write_at(&self, source: &IoBuf<'_>, position_bytes: u64) -> io::Result<usize> {
        self.write_vectored_at(slice::from_ref(source), position_bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.suffer(Transfer::none(Call::SyncData))?;
        self.inner.sync_data()
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.suffer(Transfer::none(Call::Len))?;
        self.inner.len_bytes()
    }

    fn set_len(&self, length_bytes: u64) -> io::Result<()> {
        self.suffer(Transfer::none(Call::SetLen))?;
        self.inner.set_len(length_bytes)
    }

    fn describe(&self) -> String {
        format!("faulty {}", self.inner.describe())
    }

    fn as_direct(&self) -> Option<&dyn DirectBacking> {
        Some(self)
    }
}

impl DirectBacking for FaultyBacking {
    fn read_vectored_at(
        &self,
        targets: &mut [IoBufMut<'_>],
        position_bytes: u64,
    ) -> io::Result<usize> {
        let length_bytes = targets.iter().map(IoBufMut::len).sum();
        let transfer = Transfer { call: Call::Read, position_bytes, length_bytes };
        let short = self.suffer(transfer)?;
        let count = match targets {
            [only] => self.inner.read_at(only, position_bytes)?,
            several => self.inner.read_vectored_at(several, position_bytes)?,
        };
        Ok(count.min(shortened(length_bytes, short, self.block_bytes(Call::Read))))
    }

    fn write_vectored_at(&self, sources: &[IoBuf<'_>], position_bytes: u64) -> io::Result<usize> {
        let length_bytes = sources.iter().map(IoBuf::len).sum();
        let transfer = Transfer { call: Call::Write, position_bytes, length_bytes };
        let short = self.suffer(transfer)?;
        let length = shortened(length_bytes, short, self.block_bytes(Call::Write));
        match &prefix(sources, length)[..] {
            [only] => self.inner.write_at(only, position_bytes),
            several => self.inner.write_vectored_at(several, position_bytes),
        }
    }

    fn submission(&self, request: &IoRequest) -> Option<Submission<'_>> {
        let transfer = Transfer::of(request);
        let submission = self.inner.submission(request)?;
        self.may_submit(transfer).then_some(submission)
    }

    fn completed(&self, request: &IoRequest, answer: io::Result<usize>) -> io::Result<usize> {
        let answer = self.inner.completed(request, answer);
        self.judge(Transfer::of(request), answer)
    }

    fn sync_all(&self) -> io::Result<()> {
        self.suffer(Transfer::none(Call::SyncAll))?;
        self.inner.sync_all()
    }

    fn fallocate(&self, mode: FallocateMode, bytes: Range<u64>) -> io::Result<()> {
        self.suffer(Transfer::none(Call::Fallocate))?;
        self.inner.fallocate(mode, bytes)
    }

    fn seek_data(&self, position_bytes: u64) -> io::Result<Option<u64>> {
        self.suffer(Transfer::none(Call::Seek))?;
        self.inner.seek_data(position_bytes)
    }

    fn seek_hole(&self, position_bytes: u64) -> io::Result<Option<u64>> {
        self.suffer(Transfer::none(Call::Seek))?;
        self.inner.seek_hole(position_bytes)
    }

    fn alignment(&self) -> Alignment {
        self.inner.alignment()
    }

    fn identity(&self) -> Option<FileIdentity> {
        self.inner.identity()
    }

    fn direct(&self) -> DirectStatus {
        self.inner.direct()
    }
}

/// Returns the first `length` bytes of adjacent windows.
fn prefix<'a>(sources: &[IoBuf<'a>], length: usize) -> Vec<IoBuf<'a>> {
    let mut left = length;
    let mut parts = Vec::new();
    for source in sources {
        let part = source.prefix(source.len().min(left));
        left -= part.len();
        if !part.is_empty() {
            parts.push(part);
        }
    }
    parts
}

/// Returns the length of a shortened transfer: whole blocks, at least one, or a part of a block.
fn shortened(length: usize, short: usize, block: usize) -> usize {
    match short {
        0 => length,
        usize::MAX => 0,
        _ => (length.saturating_sub(short) / block * block).max(block.min(length)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Gate, MemoryBacking};
    use bifolio::backing::IoBuffer;
    use std::time::{Duration, Instant};

    fn faulty() -> FaultyBacking {
        FaultyBacking::new(MemoryBacking::new((0..100).collect()))
    }

    fn libc_error(errno: i32) -> io::Error {
        io::Error::from_raw_os_error(errno)
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
    fn a_transfer_of_several_windows_is_one_call() {
        let backing = faulty();
        let mut buffers = [IoBuffer::new(10), IoBuffer::new(10)];
        let mut read = || {
            let mut targets = buffers.each_mut().map(IoBuffer::target);
            let count = backing.read_vectored_at(&mut targets, 60).map_err(|error| error.kind());
            (count, buffers[1].as_bytes().to_vec())
        };
        assert_eq!(read(), (Ok(20), (70..80).collect()));
        backing.inject(Fault::on(Call::Read).nth(2).at(79..80).fails(libc::EINTR));
        backing.inject(Fault::on(Call::Read).short_by(3));
        assert_eq!(read().0, Ok(17));
        assert_eq!(read().0, Err(io::ErrorKind::Interrupted));
        assert_eq!((backing.calls(Call::Read), backing.struck()), (3, 2));
    }

    #[test]
    fn a_short_write_of_several_windows_ends_anywhere_in_them() {
        let filled = [1, 2, 3].map(|byte| IoBuffer::from_bytes(&[byte; 10]));
        let sources = filled.each_ref().map(IoBuffer::source);
        for (short, expected) in [(0, 30), (1, 29), (10, 20), (15, 15), (29, 1), (usize::MAX, 0)] {
            let memory = Arc::new(MemoryBacking::new(Vec::new()));
            let backing = FaultyBacking::over(memory.clone());
            backing.inject(Fault::on(Call::Write).short_by(short));
            assert_eq!(backing.write_vectored_at(&sources, 5).unwrap(), expected);
            let all = [&[0; 5], &[1; 10][..], &[2; 10], &[3; 10]].concat();
            let end = if expected == 0 { 0 } else { 5 + expected };
            assert_eq!(memory.bytes(), all[..end], "short by {short}");
        }
    }

    fn transfer(call: Call, position_bytes: u64) -> Transfer {
        Transfer { call, position_bytes, length_bytes: 10 }
    }

    #[test]
    fn transfers_are_counted_once_in_the_order_they_start() {
        let backing = faulty();
        backing.inject(Fault::on(Call::Read).nth(2).fails(libc::EIO));
        backing.inject(Fault::on(Call::Read).nth(3).short_by(4));
        let transfers = [0, 10, 20, 30].map(|at| transfer(Call::Read, at));
        for transfer in transfers {
            assert!(backing.may_submit(transfer) && backing.may_submit(transfer));
        }
        assert_eq!((backing.calls(Call::Read), backing.submitted()), (4, 0));
        let mut judge = |at: usize| backing.judge(transfers[at], Ok(10)).map_err(|e| e.kind());
        assert_eq!([3, 2].map(&mut judge), [Ok(10), Ok(6)]);
        assert_eq!([1, 0].map(&mut judge).map(|answer| answer.is_ok()), [false, true]);
        let counts = (backing.calls(Call::Read), backing.struck(), backing.submitted());
        assert_eq!(counts, (4, 2, 4));
        assert!(backing.state().started.is_empty());
    }

    #[test]
    fn a_transfer_made_again_meets_its_fault() {
        let backing = faulty();
        backing.inject(Fault::on(Call::Write).fails(libc::ENXIO));
        assert!(backing.may_submit(transfer(Call::Write, 30)));
        let sent_back = backing.judge(transfer(Call::Write, 30), Err(libc_error(libc::EINTR)));
        assert_eq!(sent_back.unwrap_err().kind(), io::ErrorKind::Interrupted);
        assert_eq!(write(&backing, 30), Err(libc::ENXIO));
        assert_eq!((backing.calls(Call::Write), write(&backing, 30)), (1, Ok(10)));
        // An error of the storage itself goes through; if there is a fault too, that comes first.
        backing.inject(Fault::on(Call::Write).nth(2).fails(libc::ENXIO));
        for errno in [libc::EDOM, libc::ENXIO] {
            assert!(backing.may_submit(transfer(Call::Write, 30)));
            let failed = backing.judge(transfer(Call::Write, 30), Err(libc_error(libc::EDOM)));
            assert_eq!(failed.unwrap_err().raw_os_error(), Some(errno));
        }
    }

    #[test]
    fn a_submitted_write_claims_whole_blocks() {
        let alignment = Alignment { memory_bytes: 1, offset_bytes: 512 };
        let backing = FaultyBacking::new(MemoryBacking::strict(Vec::new(), alignment));
        let transfer = Transfer { call: Call::Write, position_bytes: 0, length_bytes: 2048 };
        backing.inject(Fault::on(Call::Write).short_by(600));
        assert!(backing.may_submit(transfer));
        assert_eq!(backing.judge(transfer, Ok(2048)).unwrap(), 1024);
        // The cache submits whole blocks, and less than it was going to transfer.
        backing.inject(Fault::on(Call::Write).short_by(1));
        assert!(backing.may_submit(transfer));
        assert_eq!(backing.judge(transfer, Ok(512)).unwrap(), 512);
    }

    #[test]
    fn a_transfer_that_is_to_be_late_is_not_submitted() {
        let backing = faulty();
        let gate = Gate::new();
        backing.inject(Fault::on(Call::Read).nth(2).held(&gate));
        let may_submit = [0, 10, 20].map(|at| backing.may_submit(transfer(Call::Read, at)));
        assert_eq!(may_submit, [true, false, true]);
        thread::scope(|scope| {
            let late = scope.spawn(|| read(&backing, 10));
            gate.wait_for_arrivals(1);
            assert_eq!(backing.judge(transfer(Call::Read, 20), Ok(10)).unwrap(), 10);
            backing.heal();
            assert!(!late.is_finished());
            gate.open();
            assert_eq!(late.join().unwrap(), Ok(10));
        });
        assert_eq!(backing.calls(Call::Read), 3);
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
