//! Calls that were submitted, and the server of each device, to which they are submitted
//! (`server.rs`): futures, servers and threads share them.

use super::handover::{Call, Handover, Inbox};
use super::job_list::JobList;
use super::pending::{Pending, Work, polled_again};
use crate::error::{Error, Result};
use crate::file::Handle;
use crate::inode::Inode;
use crate::io::{Engine, Lane, lane_of};
use crate::memory::Memory;
use crate::sync::{Mutex, Ordering};
use crate::sys::process::Origin;
use crate::sys::ring::Bell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Weak};
use std::task::{Poll, Wake, Waker};

/// Reason for which a call waits. Files and handles are named by their addresses, which they keep
/// while calls of them are queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaitKey {
    /// Room under the limit of dirty bytes, which files with a write gate share less of.
    Room { has_gate: bool },
    /// The right to change the length of a file.
    Length(u64),
    /// A thread that makes the calls of a file.
    Thread(u64),
    /// A thread that syncs the file of a handle.
    Sync(usize),
}

impl WaitKey {
    pub(super) fn of_thread(pending: &Pending) -> Self {
        let handle = &pending.file.handle;
        match pending.work {
            Work::Sync => Self::Sync(Arc::as_ptr(handle).addr()),
            _ => Self::Thread(handle.inode.address),
        }
    }
}

/// Number of a call that the server does not know yet.
pub(super) const NO_NUMBER: usize = usize::MAX;
/// Number of a call that a thread makes, and the server does not know.
pub(super) const OF_THREAD: usize = NO_NUMBER - 1;

/// A call that was submitted: shared by its future, the server or a thread, and wakers.
#[derive(Debug)]
pub(super) struct AsyncCall {
    pub(super) server: Arc<ReadServer>,
    pub(super) handover: Handover<Pending>,
    /// Number by which the server knows the call; only the server uses it, or [`OF_THREAD`].
    pub(super) number: AtomicUsize,
}

impl AsyncCall {
    pub(super) fn poll(&self, waker: &Waker) -> Poll<Result<Pending>> {
        if self.server.origin.is_forked() {
            return Poll::Ready(Err(Error::forked()));
        }
        self.handover.poll(waker).map(|pending| pending.ok_or_else(polled_again))
    }

    /// Frees what belongs to the caller of a read that has no future any more.
    pub(super) fn abandon(this: &Arc<Self>) {
        if this.server.origin.is_forked() {
            // Another thread may have held the lock during the fork.
            return std::mem::forget(Arc::clone(this));
        }
        drop(this.handover.abandon());
        this.call_again();
    }

    /// Returns `true` if a thread makes the call, and the server does not know it.
    pub(super) fn is_of_thread(&self) -> bool {
        // Relaxed: set before the call was put on a list, which this thread has read.
        self.number.load(Ordering::Relaxed) == OF_THREAD
    }

    /// Lets the server look at the call again. Has no effect on a call that it does not know.
    pub(super) fn call_again(self: &Arc<Self>) {
        if self.server.inbox.submit_again(Arc::clone(self)) == Call::Ring {
            self.server.bell.ring();
        }
    }

    /// Completes the call, and wakes its task. A waker that panics has no effect here.
    pub(super) fn complete(&self, end: impl FnOnce(&mut Pending)) {
        if let Some(waker) = self.handover.complete(end) {
            let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
        }
    }
}

/// Called when a folio lock is released that the read waits for.
impl Wake for AsyncCall {
    fn wake(self: Arc<Self>) {
        self.call_again();
    }
}

#[derive(Debug)]
pub(super) struct ReadServer {
    pub(super) lane: Lane,
    pub(super) inbox: Inbox<Arc<AsyncCall>>,
    pub(super) jobs: JobList<WaitKey, Arc<AsyncCall>>,
    pub(super) bell: Arc<Bell>,
    pub(super) engine: Arc<Engine>,
    pub(super) memory: Arc<Memory>,
    origin: Origin,
}

/// The servers of a cache, one per device whose files have used one.
#[derive(Debug, Default)]
struct ReadServers(Mutex<Vec<Weak<ReadServer>>>);

impl ReadServer {
    /// Returns the server of a handle's device, which the handle keeps from then on.
    pub(super) fn of(handle: &Handle) -> Result<Arc<Self>> {
        if let Some(server) = handle.call_server.get() {
            return Ok(server);
        }
        let servers = handle.host.call_servers.get_or_attach(Arc::<ReadServers>::default());
        let server = servers.server_for(&handle.inode)?;
        Ok(handle.call_server.get_or_attach(server))
    }
}

impl ReadServers {
    /// Returns the server of a file's device, which all its files share; creates it for the first.
    fn server_for(&self, inode: &Inode) -> Result<Arc<ReadServer>> {
        // A read of a memory file without a swap waits for locks only.
        let alone = || Lane::Alone(std::ptr::from_ref(inode).addr());
        let lane = inode.store.reader().map_or_else(alone, |reader| lane_of(&reader));
        let mut servers = self.0.lock();
        servers.retain(|server| server.strong_count() > 0);
        let found = servers.iter().filter_map(Weak::upgrade).find(|server| server.lane == lane);
        if let Some(server) = found {
            return Ok(server);
        }
        let refused = |source| Error::memory("an event descriptor for asynchronous reads", source);
        let server = Arc::new(ReadServer {
            lane,
            inbox: Inbox::default(),
            jobs: JobList::default(),
            bell: Arc::new(Bell::new().map_err(refused)?),
            engine: Arc::clone(&inode.engine),
            memory: Arc::clone(&inode.memory),
            origin: Origin::here(),
        });
        servers.push(Arc::downgrade(&server));
        Ok(server)
    }
}

#[cold]
pub(super) fn end_unserved(call: &AsyncCall) {
    call.complete(|pending| pending.fail(thread_has_ended()));
}

#[cold]
pub(super) fn thread_has_ended() -> Error {
    Error::thread(std::io::Error::other("the thread that serves asynchronous calls has ended"))
}
