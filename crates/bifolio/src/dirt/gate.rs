//! The write gate of a file: the user's [`WriteGate`], the LSN that is known to be durable, and the
//! requests to its thread. `writeback/gate.rs` has the protocol and the thread.

use super::lsns::{HeldBack, KnownDurable, UNCOMMITTED, may_pass};
use crate::error::{Error, ErrorKind, Result, write_error};
use crate::sync::{Condvar, Mutex, blocking};
use std::cell::RefCell;
use std::fmt::{self, Debug};
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pause in the background after a failed call; it doubles with each failure.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(320);

/// Tells the cache how far a write-ahead log is durable, so that no page reaches the storage before
/// the log record of its changes. Set for a file with
/// [`Cache::open_gated`](crate::Cache::open_gated).
///
/// An LSN is a number that grows with the log, such as a position in it; what it counts is up to
/// the engine. LSN 0 means "no log record needed". [`u64::MAX`] means "not committed": such a page
/// is not written out until [`GatedFile::assign_lsn`](crate::GatedFile::assign_lsn) replaces the
/// LSN.
///
/// # Guarantees of a gate
/// - [`durable_lsn`](Self::durable_lsn) returns at once: it loads an atomic, and takes no lock that
///   a thread may hold during a call of the cache. It is called for each write with an LSN.
/// - [`make_durable`](Self::make_durable) may block, and several threads may call it at the same
///   time. It does not wait for a thread that is in a call for the gated file or holds a
///   [`PageRefMut`](crate::PageRefMut) of it: that thread may wait for the gate.
///   In the background, `lsn` is the highest of the pages to be written, so that one flush of the
///   log is enough for all of them; if that fails, it is the lowest.
/// - It may use other files of the cache, such as the log, but not the file that it is set for:
///   such a call fails with [`ErrorKind::GateMisuse`].
/// - It does not panic. A call that panics counts as failed.
pub trait WriteGate: Send + Sync {
    /// Returns the LSN up to which the log is durable. Never decreases.
    fn durable_lsn(&self) -> u64;

    /// Makes the log durable up to `lsn`, or further.
    ///
    /// # Errors
    /// The reason why the log is not durable. The pages stay dirty, and the call is tried again: in
    /// the background, and by each sync.
    fn make_durable(&self, lsn: u64) -> io::Result<()>;
}

impl Debug for dyn WriteGate + '_ {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("WriteGate").finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(crate) struct Gate {
    user: Mutex<Arc<dyn WriteGate>>,
    known: KnownDurable,
    asks: Mutex<Asks>,
    /// Signalled when the thread need not pause any longer.
    pause_ended: Condvar,
}

#[derive(Debug, Default)]
struct Asks {
    is_running: bool,
    next: Option<Ask>,
    /// Last failed call, unless the log has become durable further since.
    failure: Option<Failure>,
    failures: u64,
}

#[derive(Debug)]
struct Failure {
    error: Arc<io::Error>,
    at: Instant,
    pause: Duration,
}

#[derive(Debug)]
pub(crate) struct Ask {
    /// Lowest and highest LSN of the folios.
    pub(crate) lsns: (u64, u64),
    /// Number of folios to be written out once they may pass, and bytes.
    pub(crate) folios: u64,
    pub(crate) range: Option<Range<u64>>,
}

thread_local! {
    /// Addresses of the inodes whose gates the calling thread is in.
    static INSIDE: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Returns `true` if the calling thread is in a call of any gate.
pub(crate) fn is_inside_any() -> bool {
    INSIDE.try_with(|inside| !inside.borrow().is_empty()).unwrap_or(false)
}

/// Returns `true` if the calling thread is in a call of the gate of the inode at this address.
pub(crate) fn is_inside(inode: u64) -> bool {
    INSIDE.try_with(|inside| inside.borrow().contains(&inode)).unwrap_or(false)
}

fn call<R>(inode: u64, gate: impl FnOnce() -> io::Result<R>) -> io::Result<R> {
    INSIDE.with_borrow_mut(|inside| inside.push(inode));
    let called = blocking::apart(|| catch_unwind(AssertUnwindSafe(gate)));
    INSIDE.with_borrow_mut(|inside| inside.pop());
    called.unwrap_or_else(|_| Err(io::Error::other("the write gate panicked")))
}

impl Gate {
    pub(crate) fn new(user: Arc<dyn WriteGate>) -> Self {
        Self {
            user: Mutex::new(user),
            known: KnownDurable::default(),
            asks: Mutex::default(),
            pause_ended: Condvar::default(),
        }
    }

    /// Replaces the user's gate by one for the same log.
    pub(crate) fn replace(&self, user: Arc<dyn WriteGate>) {
        let old = std::mem::replace(&mut *self.user.lock(), user);
        // It may be the last reference: the gate is dropped without the lock.
        drop(old);
        self.forget_failure();
    }

    pub(crate) fn durable(&self) -> u64 {
        self.known.get()
    }

    fn user(&self) -> Arc<dyn WriteGate> {
        Arc::clone(&self.user.lock())
    }

    /// Asks the gate how far the log is durable.
    pub(crate) fn refresh(&self, inode: u64) -> u64 {
        let user = self.user();
        match call(inode, || Ok(user.durable_lsn())) {
            Ok(lsn) if self.known.raise(lsn) => self.forget_failure(),
            Ok(_) => {}
            Err(error) => log::error!("{error}"),
        }
        self.known.get()
    }

    /// Makes the log durable up to `lsn`, and notes a failure. Blocks for the gate. `count` counts
    /// a call of the gate.
    pub(crate) fn make_durable(&self, inode: u64, lsn: u64, count: impl FnOnce()) -> Opened {
        let made = self.try_make_durable(inode, lsn, count).map_err(Arc::new);
        made.inspect_err(|error| self.note_failure(Arc::clone(error)))
    }

    /// Makes the log durable up to `lsn`, unless it is known to be. Blocks for the gate, without a
    /// lock.
    pub(crate) fn try_make_durable(
        &self,
        inode: u64,
        lsn: u64,
        count: impl FnOnce(),
    ) -> io::Result<()> {
        if may_pass(lsn, self.known.get()) || may_pass(lsn, self.refresh(inode)) {
            return Ok(());
        }
        count();
        let user = self.user();
        call(inode, || user.make_durable(lsn))?;
        self.known.raise(lsn);
        self.refresh(inode);
        self.forget_failure();
        Ok(())
    }

    fn note_failure(&self, error: Arc<io::Error>) {
        let mut asks = self.asks.lock();
        asks.failures += 1;
        let last = asks.failure.take();
        let pause = last.map_or(PAUSE_MIN, |last| (2 * last.pause).min(PAUSE_MAX));
        asks.failure = Some(Failure { error, at: Instant::now(), pause });
    }

    /// Notes that no thread could be started for the queued request: the next one tries again.
    pub(crate) fn note_no_thread(&self, error: io::Error) {
        self.note_failure(Arc::new(error));
        self.asks.lock().is_running = false;
    }

    fn forget_failure(&self) {
        if self.asks.lock().failure.take().is_some() {
            self.pause_ended.notify_all();
        }
    }

    /// Queues a request. Returns `true` if the caller must start a thread for it.
    pub(crate) fn queue(&self, ask: Ask) -> bool {
        let mut asks = self.asks.lock();
        match &mut asks.next {
            Some(next) => next.merge(ask),
            none => *none = Some(ask),
        }
        !std::mem::replace(&mut asks.is_running, true)
    }

    /// Returns the next request, after the pause that follows a failed call; without one, the
    /// thread ends.
    pub(crate) fn next(&self) -> Option<Ask> {
        let mut asks = self.asks.lock();
        while let Some(failure) = asks.failure.as_ref().filter(|_| asks.next.is_some()) {
            let left = failure.pause.saturating_sub(failure.at.elapsed());
            if left.is_zero() {
                break;
            }
            self.pause_ended.wait_for(&mut asks, left);
        }
        let next = asks.next.take();
        asks.is_running = next.is_some();
        next
    }

    /// Returns the number of failed calls.
    pub(crate) fn failures(&self) -> u64 {
        self.asks.lock().failures
    }

    pub(crate) fn failure(&self) -> Option<Arc<io::Error>> {
        self.asks.lock().failure.as_ref().map(|failure| Arc::clone(&failure.error))
    }
}

impl Ask {
    fn merge(&mut self, other: Self) {
        self.lsns = (self.lsns.0.min(other.lsns.0), self.lsns.1.max(other.lsns.1));
        self.folios = self.folios.max(other.folios);
        self.range = match (self.range.take(), other.range) {
            (Some(one), Some(two)) => Some(one.start.min(two.start)..one.end.max(two.end)),
            (one, two) => one.or(two),
        };
    }
}

/// A patient write-out at the gate of its file, or why the gate refused. A file may get its gate
/// after the write-out has begun, so each step looks for it.
pub(crate) type Opened = std::result::Result<(), Arc<io::Error>>;

/// Error of a gate that holds bytes back.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) file: String,
    pub(crate) held: HeldBack,
    pub(crate) held_bytes: u64,
    pub(crate) cause: Option<Arc<io::Error>>,
}

impl Refusal {
    pub(crate) fn check(refusal: Option<Self>) -> Result<()> {
        refusal.map_or(Ok(()), |refusal| Err(refusal.to_error()))
    }

    /// Returns the error of a call that the gate has refused: how many bytes are held back, and
    /// why.
    pub(crate) fn to_error(&self) -> Error {
        let (lsn, held_bytes) = (self.held.lsn, self.held_bytes);
        let reason = match (lsn, &self.cause) {
            (_, Some(cause)) => format!("it cannot make LSN {lsn} durable: {cause}"),
            (UNCOMMITTED, None) => "they are not committed: written with LSN u64::MAX, or by a \
                                    PageRefMut that got no LSN (GatedFile::assign_lsn)"
                .to_owned(),
            (_, None) => format!("LSN {lsn} is not durable yet"),
        };
        let pinned_bytes = self.held_bytes / self.held.folios.max(1) * self.held.pinned;
        let pinned = match pinned_bytes {
            0 => String::new(),
            bytes => format!(
                "; {bytes} of them are in a PageRefMut that has no LSN yet (PageRefMut::assign_lsn)"
            ),
        };
        let text = format!("the write gate holds back {held_bytes} bytes: {reason}{pinned}");
        let error = Error::new(ErrorKind::Gated, text).in_file(self.file.clone());
        match &self.cause {
            Some(cause) => error.because(Arc::clone(cause)),
            None => error,
        }
    }

    /// Returns the refusal as the cause of an error of a write.
    pub(crate) fn to_io_error(&self, kind: io::ErrorKind) -> Error {
        let kind = self.cause.as_ref().map_or(kind, |cause| cause.kind());
        write_error(&self.file, 0..self.held_bytes, io::Error::new(kind, self.to_error()))
    }
}
