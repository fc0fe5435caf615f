//! The background thread: keeps some frames free, so that an allocation rarely has to reclaim.
//!
//! Woken when fewer than LOW pages are obtainable, or when a chunk should be made resident before
//! somebody has to wait for that; works until there are HIGH (twice as many), in short turns, so
//! that an allocation that must reclaim by itself gets its turn in between. It spills
//! memory files; other dirty folios in its way are the flusher's, which it tells.

use super::Reclaim;
use super::pageout::WriteOut;
use crate::error::{ErrorKind, Result};
use crate::stats::Counter;
use crate::sys::thread::OwnedThread;
use std::sync::Arc;

/// What the thread is asked to do.
#[derive(Debug, Default)]
pub(super) struct Signal {
    work: bool,
    end: bool,
}

/// The running thread; dropping it ends the thread and waits for it.
#[derive(Debug)]
pub(crate) struct Background {
    reclaim: Arc<Reclaim>,
    thread: OwnedThread,
}

impl Background {
    /// Starts the thread.
    pub(crate) fn start(reclaim: Arc<Reclaim>) -> Result<Self> {
        let shared = Arc::clone(&reclaim);
        let thread = OwnedThread::start("bifolio-reclaim", move || shared.run());
        Ok(Self { reclaim, thread: thread.map_err(ErrorKind::Thread)? })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if !self.thread.is_left_behind() {
            self.reclaim.signal.lock().end = true;
            self.reclaim.signalled.notify_all();
        }
    }
}

impl Reclaim {
    /// Wakes the thread if fewer than LOW pages are obtainable, or a chunk should be made resident.
    pub(super) fn wake_if_low(&self) {
        if self.arena().wants_chunk() || self.arena().obtainable_pages() < self.low_pages() {
            let mut signal = self.signal.lock();
            if !signal.work {
                signal.work = true;
                self.signalled.notify_one();
            }
        }
    }

    fn run(&self) {
        loop {
            {
                let mut signal = self.signal.lock();
                while !signal.work && !signal.end {
                    self.signalled.wait(&mut signal);
                }
                if signal.end {
                    return;
                }
            }
            self.memory.counters.add(Counter::BackgroundReclaim, 1);
            self.refill();
            self.signal.lock().work = false;
        }
    }

    /// Makes memory resident that the bound allows, then reclaims until HIGH pages are obtainable
    /// or nothing comes of it.
    fn refill(&self) {
        // A refusal is for whoever is in need to tell.
        while self.arena().grow_ahead(&self.memory.folios).unwrap_or(false) {}
        let high_pages = 2 * self.low_pages();
        while self.arena().obtainable_pages() < high_pages && !self.signal.lock().end {
            let counts = {
                let turn = self.take_turn();
                self.shrink(&turn, super::ROUND_PAGES, WriteOut::MemoryFiles)
            };
            if counts.reclaimed_pages == 0 {
                return;
            }
        }
    }
}
