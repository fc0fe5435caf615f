//! Batched reads whose requests are passed on in the order of their completion.
//!
//! [`File::read_many_with`] submits the misses as asynchronous reads and waits for them on the
//! calling thread. That thread owns no transfers, so the callback may use the cache (IO-5).

use super::pending_read::PendingRead;
use super::server::AsyncRead;
use super::try_read::Obstacle;
use crate::error::Result;
use crate::file::hit::Hit;
use crate::file::{File, ReadRequest};
use crate::page::is_in_one_page;
use crate::sync::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Poll, Wake, Waker};

/// Numbers of the requests whose reads are complete.
#[derive(Debug)]
struct Completions {
    numbers: Mutex<VecDeque<usize>>,
    changed: Condvar,
}

/// Waker of one request.
#[derive(Debug)]
struct Completion {
    number: usize,
    completions: Arc<Completions>,
}

impl Wake for Completion {
    fn wake(self: Arc<Self>) {
        self.completions.numbers.lock().push_back(self.number);
        self.completions.changed.notify_one();
    }
}

/// Reads in flight, by the number of their request; abandoned if a callback panics.
#[derive(Debug, Default)]
struct Reads(Vec<(usize, Arc<AsyncRead>)>);

impl Drop for Reads {
    fn drop(&mut self) {
        self.0.iter().for_each(|(_, read)| AsyncRead::abandon(read));
    }
}

impl File {
    /// Completes all `requests` like [`File::read_many`], and calls `on_done` with the number of
    /// each request and the request as soon as it is complete, in any order: the device works on
    /// the others meanwhile. Hits come first. Returns when all requests were passed on.
    ///
    /// `on_done` runs on this thread and may use the cache. The misses are asynchronous reads
    /// ([`File::read_async`]), at most 3/2 of
    /// [`CacheBuilder::io_depth`](crate::CacheBuilder::io_depth) at a time, each with a buffer of
    /// its own and one more copy. If `on_done` is not needed, `read_many` is cheaper.
    ///
    /// # Errors
    /// The handle was not opened for reading, or the cache is closed. No request is started then.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let directory = tempfile::tempdir()?;
    /// # let path = directory.path().join("file");
    /// # std::fs::write(&path, vec![7; 100_000])?;
    /// # let cache = bifolio::Cache::builder().memory(4 << 20).build()?;
    /// use bifolio::{OpenOptions, ReadRequest};
    /// let file = cache.open(&path, &OpenOptions::new())?;
    /// let mut buffers = [[0; 4096]; 8];
    /// let mut requests: Vec<_> = (0..)
    ///     .zip(&mut buffers)
    ///     .map(|(number, buffer)| ReadRequest::new(number * 12_288, buffer))
    ///     .collect();
    /// let mut sum = 0;
    /// file.read_many_with(&mut requests, |_, request| {
    ///     sum += request.buffer.iter().map(|byte| u64::from(*byte)).sum::<u64>();
    /// })?;
    /// assert_eq!(sum, 8 * 4096 * 7);
    /// # Ok(())
    /// # }
    /// ```
    pub fn read_many_with<'b>(
        &self,
        requests: &mut [ReadRequest<'b>],
        mut on_done: impl FnMut(usize, &mut ReadRequest<'b>),
    ) -> Result<()> {
        self.handle.check_readable()?;
        let (numbers, changed) = (Mutex::new(VecDeque::new()), Condvar::new());
        let completions = Arc::new(Completions { numbers, changed });
        let mut missed = Vec::new();
        for (number, request) in requests.iter_mut().enumerate() {
            if self.read_hits_of(request) { on_done(number, request) } else { missed.push(number) }
        }
        let reads_max = self.handle.inode.engine.depth() * 3 / 2;
        let mut reads = Reads::default();
        let mut missed = missed.into_iter();
        loop {
            while reads.0.len() < reads_max
                && let Some(number) = missed.next()
            {
                let request = &mut requests[number];
                match self.submit_rest(request, number, &completions) {
                    Ok(read) => reads.0.push((number, read)),
                    Err(error) => {
                        request.fail(error);
                        on_done(number, request);
                    }
                }
            }
            if reads.0.is_empty() && missed.len() == 0 {
                return Ok(());
            }
            let number = completions.wait();
            let Some(at) = reads.0.iter().position(|(other, _)| *other == number) else { continue };
            let request = &mut requests[number];
            match reads.0[at].1.poll(Waker::noop()) {
                Poll::Ready(pending) => request.extend(pending.and_then(PendingRead::into_result)),
                Poll::Pending => continue,
            }
            reads.0.swap_remove(at);
            on_done(number, request);
        }
    }

    /// Copies what is resident of a request. Returns `true` if that completes it.
    fn read_hits_of(&self, request: &mut ReadRequest<'_>) -> bool {
        request.result = Ok(0);
        match self.hit_path.read(request.buffer, request.position) {
            Hit::Done => {
                request.result = Ok(request.buffer.len());
                return true;
            }
            hit => hit.forget(request.buffer),
        }
        if let Err(error) = self.handle.range_end(request.position, request.buffer.len() as u64) {
            request.result = Err(error);
            return true;
        }
        let (done, obstacle) = self.read_available(request.buffer, request.position);
        request.result = Ok(done);
        let is_whole = done > 0 && is_in_one_page(request.position, request.buffer.len() as u64);
        is_whole || obstacle == Obstacle::None
    }

    /// Submits the part of a request that is not read.
    fn submit_rest(
        &self,
        request: &ReadRequest<'_>,
        number: usize,
        completions: &Arc<Completions>,
    ) -> Result<Arc<AsyncRead>> {
        let done = request.done();
        let buffer = vec![0; request.buffer.len() - done];
        let pending = PendingRead::new(self.clone(), request.position + done as u64, buffer);
        let completion = Completion { number, completions: Arc::clone(completions) };
        super::submit(pending, Waker::from(Arc::new(completion)))
    }
}

impl Completions {
    /// Waits for a request to be complete, and returns its number.
    fn wait(&self) -> usize {
        let mut numbers = self.numbers.lock();
        loop {
            if let Some(number) = numbers.pop_front() {
                return number;
            }
            self.changed.wait(&mut numbers);
        }
    }
}

impl ReadRequest<'_> {
    /// Appends the bytes of a read of the rest, or ends the request before the byte that could not
    /// be read.
    fn extend(&mut self, rest: Result<Vec<u8>>) {
        let done = self.done();
        match rest {
            Ok(bytes) => {
                self.buffer[done..done + bytes.len()].copy_from_slice(&bytes);
                self.result = Ok(done + bytes.len());
            }
            Err(error) => self.fail(error),
        }
    }

    /// Sets the result to the error if nothing was read.
    fn fail(&mut self, error: crate::error::Error) {
        if self.done() == 0 {
            self.result = Err(error);
        }
    }
}
