//! Faults that the thread that raises them serves, in its handler of SIGBUS.
//!
//! A message to another thread costs two context switches and the wake-up of an idle processor.
//! Stores at random to a memory file larger than the cache were 0.93 (one worker) and 0.72 (two)
//! times as fast as with the kernel's swap, and are 1.13 and 0.91 times as fast without (`bench
//! reclaim`, AMD EPYC, family 26). [`FaultMode::InThread`] says why this is not the default.
//!
//! The handler calls what a serving thread calls. It may wait and take locks of the cache, because
//! code of the cache touches no absent page of a map while it holds one; a thread that holds what a
//! fault may wait for (`sync::blocking`) is not served, and the signal goes on to the previous
//! handler.

use super::{log_inside, server_of, threads_for};
use crate::error::{Error, Result};
use crate::maps::kernel::signal;
use crate::maps::region::Region;
use crate::memory::PageSpace;
use crate::sync::blocking;

/// The threads that serve faults of a mapped file: accesses to pages that are not resident.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultMode {
    /// Threads of the cache, at the cost of two context switches. Works for every load and store.
    /// An access that the kernel makes for a system call (for example `write(2)` from a map) waits
    /// for its page only where the process may serve such faults
    /// ([`Feature::KernelFaults`](crate::Feature::KernelFaults): as root, or with
    /// `vm.unprivileged_userfaultfd` = 1); elsewhere the call fails with `EFAULT` on a page that is
    /// not resident.
    #[default]
    Threads,
    /// The faulting thread, in a handler of SIGBUS, without a context switch. What it asks of the
    /// program:
    ///
    /// - A system call on a page that is not resident fails with `EFAULT`: read or [populate] the
    ///   page first.
    /// - The handler does I/O, allocates, and takes locks of the cache: touch no map inside an
    ///   allocator, or while the thread holds a lock that such code needs, and no map from a stack
    ///   with less than 64 KiB left (a goroutine, a fiber).
    /// - A handler of SIGBUS that was installed before the first such file is opened still gets
    ///   signals that are not ours; one that is installed later must pass on those that are.
    /// - A fault ends the process if the thread blocks SIGBUS. Creating a map in such a thread is
    ///   refused; using one is not checked.
    ///
    /// [populate]: crate::Map::populate
    InThread,
}

/// Returns the mode that is `wanted`, and that of an open file, if they differ. A file that cannot
/// be mapped has none.
pub(crate) fn conflict(
    wanted: Option<FaultMode>,
    page_space: &PageSpace,
) -> Option<(FaultMode, FaultMode)> {
    let is_in_thread = Region::of(page_space)?.addresses.userfault.signals;
    let open = if is_in_thread { FaultMode::InThread } else { FaultMode::Threads };
    wanted.filter(|wanted| *wanted != open).map(|wanted| (wanted, open))
}

/// Fails if faults of the region raise a signal that the calling thread blocks.
pub(crate) fn check_signals(region: &Region) -> Result<()> {
    if !region.addresses.userfault.signals || !signal::is_blocked() {
        return Ok(());
    }
    let problem = "this thread blocks SIGBUS, in which it is to serve its own faults \
                   (FaultMode::InThread): the first would end the process";
    Err(Error::config("faults", problem))
}

/// Serves the fault of the calling thread, in its signal handler. Returns `false` if the signal is
/// not one of a region, or cannot be served: the thread is inside a call that holds something.
///
/// A page that cannot be filled is poisoned, and the access is repeated: a signal for a poisoned
/// page is not served. (It is of another kind only in kernels that are built for failures of
/// memory.)
pub(crate) fn serve_in_thread(address: usize, is_write: bool) -> bool {
    let thread = blocking::current_thread();
    if blocking::hold_of(thread).is_some() {
        if threads_for(address).is_some() {
            log_inside(address, thread);
        }
        return false;
    }
    let Some(server) = server_of(address) else { return false };
    let pages = server.pages_at(address, 1);
    if server.region.stray_pages.is_poisoned_since(pages.start, 0) {
        return false;
    }
    let _serving = blocking::serve();
    // No message can be late here: the thread that waits is this one.
    server.serve(pages, is_write, u64::MAX);
    true
}
