//! Asynchronous calls: futures that need no runtime.
//!
//! A future whose call has to wait for nothing is ready at its first poll. Otherwise that poll
//! submits the call to the *server* of the file's device, a job on a thread of the engine, or to a
//! thread that makes appends or syncs:
//!
//! ```text
//!   FileFuture::poll --> Pending::begin            ready: no server is involved
//!                    --> Inbox::submit ---.
//!                                         v
//!   ReadServer, call.rs  ReadLoop::serve: start, wait, copy, complete               server.rs
//!                        |    one step of a pin or a write                     try_write.rs
//!                        v    one call, and how far it is                        pending.rs
//!   Jobs --------------> room for dirty bytes, the length; appends, syncs           jobs.rs
//!                    <-- Handover::complete, the waker                            handover.rs
//! ```
//!
//! A call owns its buffer until its future takes it, or is dropped: that frees the buffer at once,
//! and the pages of a transfer in flight become READY as if they had been read ahead. A page that
//! another thread fills or changes is waited for without a thread: the call registers a waker for
//! its folio lock, or for the end of its write-out. A write that finds too much dirty waits on the
//! list of its device, for all of which one thread waits. The server exists while calls are
//! outstanding.

mod call;
pub(crate) mod handover;
pub(crate) mod job_list;
mod jobs;
mod pending;
mod server;
mod try_write;

use super::{File, OwnedPageRef, WriteHint};
use crate::error::Result;
use crate::page::{PAGE_SHIFT, pages_of};
use call::AsyncCall;
use pending::{Pending, Work, polled_again};
use server::submit;
use std::fmt;
use std::future::Future;
use std::mem;
use std::ops::RangeBounds;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use try_write::Need;

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
    /// read stay in the cache.
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
    pub fn read_async(&self, buffer: Vec<u8>, position: u64) -> FileFuture<Vec<u8>> {
        self.call(position, Work::Read(buffer), Pending::take_buffer)
    }

    /// Reads many ranges without blocking the thread that polls: the asynchronous
    /// [`File::read_many`]. Each request is a buffer and the position of its first byte. The
    /// results are in the order of the requests; an error of one does not affect the others.
    ///
    /// All misses are submitted by the first poll. The task is woken once for the misses that
    /// complete together. Otherwise like [`File::read_async`].
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// # bifolio_testing::block_on(async {
    /// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
    /// let requests = [(vec![0; 100], 90_000), (vec![0; 4096], 8192)];
    /// for read in file.read_many_async(requests).await? {
    ///     assert!(read?.iter().all(|byte| *byte == 7));
    /// }
    /// # bifolio::Result::Ok(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn read_many_async(
        &self,
        requests: impl IntoIterator<Item = (Vec<u8>, u64)>,
    ) -> FileFuture<Vec<Result<Vec<u8>>>> {
        let new = |(buffer, position)| {
            CallState::New(Pending::new(self.clone(), position, Work::Read(buffer)))
        };
        let steps = requests.into_iter().map(new).collect();
        let many = Many { steps, ended: Vec::new(), is_over: false };
        FileFuture(FutureCalls::Many(many, |ended| ended))
    }

    /// Pins the bytes of `range`, which must lie in one folio and in the file, without blocking the
    /// thread that polls: the asynchronous [`File::pin`]. No byte is copied.
    ///
    /// The pin is made when the page is read, and belongs to the future until that is polled again:
    /// dropping the future drops the pin. Otherwise like [`File::read_async`].
    ///
    /// # Errors
    /// The future fails like [`File::pin`] and [`File::read_async`].
    ///
    /// ```
    /// # let path = tempfile::NamedTempFile::new()?.into_temp_path();
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// # bifolio_testing::block_on(async {
    /// let file = cache.open(&path, &bifolio::OpenOptions::new())?;
    /// let page = file.pin_async(8192..12_288).await?;
    /// assert_eq!(page.u32_le(0), Some(0x0707_0707));
    /// # bifolio::Result::Ok(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn pin_async(&self, range: impl RangeBounds<u64>) -> FileFuture<OwnedPageRef> {
        self.pin_async_of(range)
    }

    /// Pins bytes of a file of kind `F`, which the caller knows it to be.
    pub(super) fn pin_async_of<F>(
        &self,
        range: impl RangeBounds<u64>,
    ) -> FileFuture<OwnedPageRef<F>> {
        let pending = Pending::pin(self.clone(), self.range_of(range));
        FileFuture(FutureCalls::One(CallState::New(pending), Pending::take_pin))
    }

    /// Writes all of `buffer` at `position` without blocking the thread that polls, and returns the
    /// buffer. A write past the end of file grows the file; a gap reads as zeros. Durable after the
    /// next sync.
    ///
    /// A write whose pages are in memory, or are replaced as a whole, is complete at the first
    /// poll. If too much is dirty ([`dirty_max`](crate::CacheBuilder::dirty_max)), the future is
    /// ready when there is room: one thread per device waits for all such writes. A page that is
    /// replaced in part and not resident is read like one of [`File::read_async`].
    ///
    /// Writes page by page: other writes may come between the folios of one. Once the future is
    /// dropped, no more bytes are written; some may have been, the first ones. Two kinds of writes
    /// are exceptions, because a thread may make them to their end: those that grow a file that can
    /// be mapped, and those with [`WriteHint::Once`].
    ///
    /// # Errors
    /// The future fails like [`File::write_at`]; the first bytes of `buffer` may have been written
    /// then.
    ///
    /// ```
    /// # bifolio_testing::block_on(async {
    /// let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let file = cache.memory_file("scratch")?;
    /// let buffer = file.write_async(b"asynchronous".to_vec(), 4096).await?;
    /// assert_eq!(file.read_async(buffer, 4096).await?, b"asynchronous");
    /// # bifolio::Result::Ok(())
    /// # })?;
    /// # Ok::<(), bifolio::Error>(())
    /// ```
    pub fn write_async(&self, buffer: Vec<u8>, position: u64) -> FileFuture<Vec<u8>> {
        self.call(position, Work::Write(buffer), Pending::take_buffer)
    }

    /// Appends `buffer` to the file without blocking the thread that polls, and returns the
    /// position of its first byte: the asynchronous [`File::append`].
    ///
    /// One thread makes all appends to a file whose futures are not ready, in the order of their
    /// first polls, and waits for room if too much is dirty. An append that it has begun is made as
    /// a whole even if the future is dropped; one that it has not is not made.
    ///
    /// # Errors
    /// The future fails like [`File::append`].
    ///
    /// ```
    /// # bifolio_testing::block_on(async {
    /// let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// let log = cache.memory_file("log")?;
    /// assert_eq!(log.append_async(b"first".to_vec()).await?, 0);
    /// assert_eq!(log.append_async(b"second".to_vec()).await?, 5);
    /// # bifolio::Result::Ok(())
    /// # })?;
    /// # Ok::<(), bifolio::Error>(())
    /// ```
    pub fn append_async(&self, buffer: Vec<u8>) -> FileFuture<u64> {
        self.call(0, Work::Append(buffer), Pending::take_position)
    }

    /// Makes every write durable that returned, or whose future was ready, before the first poll:
    /// the asynchronous [`File::sync_data`]. The futures of a handle that wait at the same time
    /// share one sync, which a thread makes.
    ///
    /// # Errors
    /// The future fails like [`File::sync_data`]. Futures that share a sync have the same result.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// # bifolio_testing::block_on(async {
    /// let options = bifolio::OpenOptions::new().write(true).create(true);
    /// let log = cache.open(directory.path().join("log"), &options)?;
    /// log.append_async(b"entry".to_vec()).await?;
    /// log.sync_async().await?;
    /// # bifolio::Result::Ok(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn sync_async(&self) -> FileFuture<()> {
        self.call(0, Work::Sync, Pending::take_nothing)
    }

    fn call<T>(
        &self,
        position: u64,
        work: Work,
        output: fn(&mut Pending) -> Result<T>,
    ) -> FileFuture<T> {
        let pending = Pending::new(self.clone(), position, work);
        FileFuture(FutureCalls::One(CallState::New(pending), output))
    }
}

/// A call of a [`File`] that completes later: the future of all its asynchronous methods. The
/// output is a `Result<T>`.
///
/// Needs no runtime, and may be dropped or leaked at any moment. It is a handle of the file. If it
/// is the last one when it is dropped, a thread of the cache may close the file a moment later. A
/// waker must not call into the cache, nor drop the last future of a file.
#[must_use = "a future does nothing until it is polled"]
pub struct FileFuture<T>(FutureCalls<T>);

/// The calls of a future, and what makes its output.
enum FutureCalls<T> {
    One(CallState, fn(&mut Pending) -> Result<T>),
    Many(Many, fn(Vec<Result<Vec<u8>>>) -> T),
}

#[allow(clippy::large_enum_variant, reason = "a hit ends at the first poll, without an allocation")]
enum CallState {
    New(Pending),
    Submitted(Arc<AsyncCall>),
    Ended(Result<Vec<u8>>),
    Over,
}

impl CallState {
    /// Polls a call. A call that is complete at the first poll is not moved.
    #[inline]
    fn poll<T>(&mut self, waker: &Waker, output: fn(&mut Pending) -> Result<T>) -> Poll<Result<T>> {
        let ended = match self {
            Self::New(pending) => match pending.begin() {
                Ok(Need::Nothing) => output(pending),
                Ok(need) => match self.submit(need, waker) {
                    Ok(()) => return Poll::Pending,
                    Err(error) => Err(error),
                },
                Err(error) => Err(error),
            },
            Self::Submitted(call) => {
                let ended = std::task::ready!(call.poll(waker));
                ended.and_then(|mut pending| output(&mut pending))
            }
            Self::Ended(_) | Self::Over => Err(polled_again()),
        };
        *self = Self::Over;
        Poll::Ready(ended)
    }

    /// Submits a new call, which waits for `need`.
    fn submit(&mut self, need: Need, waker: &Waker) -> Result<()> {
        let Self::New(pending) = mem::replace(self, Self::Over) else { return Ok(()) };
        let (file, wanted) = (pending.file.clone(), pending.wanted());
        let is_read = matches!(pending.work, Work::Read(_) | Work::Pin { .. });
        *self = Self::Submitted(submit(pending, need, waker.clone())?);
        let end = wanted.end.min(file.len());
        if is_read && need == Need::Page && wanted.start < end {
            let pages = wanted.start >> PAGE_SHIFT..pages_of(&(wanted.start..end)).end;
            file.handle.read_ahead(file.handle.plan_after_miss(pages));
        }
        Ok(())
    }

    fn abandon(&self) {
        if let Self::Submitted(call) = self {
            AsyncCall::abandon(call);
        }
    }
}

/// Reads of one future. All are submitted by the first poll, without its waker. That waits for the
/// first one that has not ended, so that the task is not woken for each.
struct Many {
    steps: Vec<CallState>,
    ended: Vec<Result<Vec<u8>>>,
    is_over: bool,
}

impl Many {
    /// Submits all reads at the first poll, then collects the results in order. Only the first read
    /// that is not complete has the waker.
    fn poll(&mut self, waker: &Waker) -> Poll<Result<Vec<Result<Vec<u8>>>>> {
        if self.is_over {
            return Poll::Ready(Err(polled_again()));
        }
        if self.ended.is_empty() {
            for step in &mut self.steps {
                if let CallState::New(_) = step
                    && let Poll::Ready(ended) = step.poll(Waker::noop(), Pending::take_buffer)
                {
                    *step = CallState::Ended(ended);
                }
            }
        }
        while let Some(step) = self.steps.get_mut(self.ended.len()) {
            let ended = match step {
                CallState::Ended(ended) => mem::replace(ended, Ok(Vec::new())),
                step => std::task::ready!(step.poll(waker, Pending::take_buffer)),
            };
            self.ended.push(ended);
        }
        self.is_over = true;
        Poll::Ready(Ok(mem::take(&mut self.ended)))
    }
}

impl<T> FileFuture<T> {
    /// Says what will be done with the bytes of this write or append, instead of the hint of the
    /// handle ([`File::set_write_hint`]). Has no effect on other calls, or after the first poll.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// # bifolio_testing::block_on(async {
    /// let options = bifolio::OpenOptions::new().write(true).create(true);
    /// let backup = cache.open(directory.path().join("backup"), &options)?;
    /// let block = vec![7; 100_000];
    /// backup.write_async(block, 0).write_hint(bifolio::WriteHint::Once).await?;
    /// # bifolio::Result::Ok(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn write_hint(mut self, hint: WriteHint) -> Self {
        if let FutureCalls::One(CallState::New(pending), _) = &mut self.0 {
            pending.hint = Some(hint);
        }
        self
    }
}

impl<T> Future for FileFuture<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        match &mut self.0 {
            FutureCalls::One(step, output) => step.poll(context.waker(), *output),
            FutureCalls::Many(many, output) => {
                many.poll(context.waker()).map(|ended| ended.map(*output))
            }
        }
    }
}

impl<T> Drop for FileFuture<T> {
    fn drop(&mut self) {
        match &self.0 {
            FutureCalls::One(step, _) => step.abandon(),
            FutureCalls::Many(many, _) => many.steps.iter().for_each(CallState::abandon),
        }
    }
}

impl<T> fmt::Debug for FileFuture<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("FileFuture").finish_non_exhaustive()
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
