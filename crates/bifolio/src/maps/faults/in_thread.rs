//! Faults that the thread that raises them serves, in its handler of SIGBUS.
//!
//! A message to another thread costs two context switches and the wake-up of an idle processor.
//! Stores at random to a memory file larger than the cache were 0.93 (one worker) and 0.72 (two)
//! times as fast as with the kernel's swap, and are 0.94 and 1.03 times as fast without (`bench
//! reclaim`, AMD EPYC, family 26). [`FaultMode::InThread`](crate::FaultMode::InThread) says why
//! this is not the default.
//!
//! The handler calls what a serving thread calls. It may wait and take locks of the cache, because
//! code of the cache touches no absent page of a map while it holds one; a thread that holds what a
//! fault may wait for (`sync::blocking`) is not served, and the signal goes on to the previous
//! handler.

use super::{log_inside, server_of, threads_for};
use crate::error::{Error, Result};
use crate::maps::kernel::signal;
use crate::maps::region::Region;
use crate::sync::blocking;

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
