//! Asynchronous reads: futures that need no runtime.
//!
//! A future that finds its bytes in memory is ready at its first poll. Otherwise that poll submits
//! the read to the *server* of the file's device, a job on a thread of the engine:
//!
//! ```text
//!   ReadFuture::poll --> File::read_available      ready: no server is involved
//!                    --> Inbox::submit ---.
//!                                         v
//!   ReadServer --------> Server::serve: start, wait, copy, complete                 server.rs
//!                    <-- Handover::complete, the waker                            handover.rs
//! ```
//!
//! A read owns its buffer until its future takes it, or is dropped: that frees the buffer at once,
//! and the pages of a transfer in flight become READY as if they had been read ahead. A page that
//! another thread fills or changes is waited for without a thread: the read registers a waker for
//! its folio lock. The server exists while reads are outstanding.

pub(crate) mod handover;
mod server;

pub(super) use server::{ReadServer, ReadServers};

use super::File;
use super::hit::Hit;
use super::read::Obstacle;
use crate::error::Result;
use crate::fill::own_pins;
use crate::page::{PAGE_SHIFT, pages_of};
use server::{AsyncRead, PendingRead};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

impl File {
    /// Reads `buffer.len()` bytes at `position` without blocking the thread that polls. The future
    /// owns the buffer, and returns it with the length of what was read, which is as in
    /// [`File::read_at`].
    ///
    /// Needs no runtime: works with any executor. A hit is ready at the first poll. A miss is
    /// submitted by the first poll, and wakes the task when it is complete. Sequential reads start
    /// readahead, as those of `read_at` do.
    ///
    /// Misses are served by one thread per device, which exists while reads are outstanding, and by
    /// as many transfers in flight as [`CacheBuilder::io_depth`](crate::CacheBuilder::io_depth)
    /// allows. Transfers of a [`Backing`](crate::backing::Backing) that names no file, or without
    /// io_uring, are made by the cache's pool of threads, up to 16 of a device at a time; one that
    /// hangs may delay the other reads of its device. Any number of reads works in a cache of any
    /// size.
    ///
    /// The future may be dropped at any moment: that frees the buffer, and the pages that are being
    /// read stay in the cache. The future is a handle of the file. If it is the last one when it is
    /// dropped, a thread of the cache may close the file a moment later. A waker must not call into
    /// the cache, nor drop the last future of a file.
    ///
    /// # Errors
    /// The future fails like [`File::read_at`], and with
    /// [`ErrorKind::Thread`](crate::ErrorKind::Thread) if the server cannot be started.
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// # bifolio_testing::block_on(async {
    /// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
    /// let bytes = file.read_async(vec![0; 4096], 99_000).await?;
    /// assert_eq!(bytes, vec![7; 1000]);
    /// # bifolio::Result::Ok(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn read_async(&self, buffer: Vec<u8>, position: u64) -> ReadFuture {
        ReadFuture(Step::New(PendingRead::new(self.clone(), position, buffer)))
    }
}

/// The future of [`File::read_async`].
#[must_use = "a future does nothing until it is polled"]
pub struct ReadFuture(Step);

enum Step {
    New(PendingRead),
    Submitted(Arc<AsyncRead>),
    Over,
}

impl ReadFuture {
    /// Tries the read, and submits it if it would have to wait.
    fn start(&mut self, mut pending: PendingRead, context: &Context<'_>) -> Poll<Result<Vec<u8>>> {
        let position = pending.position;
        match pending.file.hit_path.read(&mut pending.buffer, position) {
            Hit::Done => return Poll::Ready(Ok(pending.buffer)),
            hit => hit.forget(&mut pending.buffer),
        }
        pending.file.handle.check_readable()?;
        let end = pending.file.handle.range_end(position, pending.buffer.len() as u64)?;
        let (done, obstacle) = pending.file.read_available(&mut pending.buffer, position);
        pending.result = Ok(done);
        if done > 0 {
            pending.file.handle.note_read(position..position + done as u64);
        }
        if obstacle == Obstacle::None {
            return Poll::Ready(pending.into_result());
        }
        let file = pending.file.clone();
        own_pins::check(&file.handle.inode, &pages_of(&(position..end)))?;
        self.0 = Step::Submitted(AsyncRead::submit(pending, context.waker().clone())?);
        let pages = position + done as u64..end.min(file.len());
        if obstacle == Obstacle::Absent && !pages.is_empty() {
            let first = pages.start >> PAGE_SHIFT;
            file.handle.read_ahead(file.handle.plan_after_miss(first..pages_of(&pages).end));
        }
        Poll::Pending
    }
}

impl Future for ReadFuture {
    type Output = Result<Vec<u8>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match std::mem::replace(&mut self.0, Step::Over) {
            Step::New(pending) => self.start(pending, context),
            Step::Submitted(read) => match read.poll(context.waker()) {
                Poll::Ready(pending) => Poll::Ready(pending.and_then(PendingRead::into_result)),
                Poll::Pending => {
                    self.0 = Step::Submitted(read);
                    Poll::Pending
                }
            },
            Step::Over => Poll::Ready(Err(server::polled_again())),
        }
    }
}

impl Drop for ReadFuture {
    fn drop(&mut self) {
        if let Step::Submitted(read) = &self.0 {
            AsyncRead::abandon(read);
        }
    }
}

impl fmt::Debug for ReadFuture {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ReadFuture").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::page::Lookup;
    use crate::{Cache, OpenOptions};
    use std::pin::pin;
    use std::sync::mpsc;
    use std::task::Waker;
    use std::thread;
    use std::time::{Duration, Instant};

    fn wait_until(what: &str, is_so: impl Fn() -> bool) {
        let begun = Instant::now();
        while !is_so() {
            assert!(begun.elapsed() < Duration::from_secs(30), "{what}: not in 30 seconds");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_dropped_future_leaves_no_waker_at_a_locked_page() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, vec![7; 8192]).unwrap();
        let cache = Cache::builder().memory(1 << 20).build().unwrap();
        let file = cache.open(&path, &OpenOptions::new().write(true)).unwrap();
        let (locked, is_locked) = mpsc::channel();
        let (done, is_done) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let file = &file;
            scope.spawn(move || {
                let pin = file.pin_mut(0..8).unwrap();
                locked.send(()).unwrap();
                let _ = is_done.recv();
                drop(pin);
            });
            is_locked.recv().unwrap();
            let inode = &file.handle.inode;
            let found = inode.mapping.get_folio(&inode.memory.folios, 0);
            let Lookup::Folio(folio) = found else { panic!("{found:?}") };
            for _ in 0..10 {
                {
                    let mut future = pin!(file.read_async(vec![0; 8], 0));
                    let mut context = Context::from_waker(Waker::noop());
                    assert!(future.as_mut().poll(&mut context).is_pending());
                    wait_until("the read waits", || folio.folio().lock_wakers() == 1);
                }
                wait_until("its waker is forgotten", || folio.folio().lock_wakers() == 0);
            }
            drop(done);
        });
    }
}
