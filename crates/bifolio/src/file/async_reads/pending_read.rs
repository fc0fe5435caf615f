//! A read that waits for pages: its request, its buffer, and what was read so far. It belongs to
//! its future, or, once it is submitted, to the state that the future shares with the server.

use super::try_read::Obstacle;
use crate::error::{Error, Result};
use crate::file::File;
use crate::file::read_many::ReadRequest;
use crate::page::is_in_one_page;

#[derive(Debug)]
pub(super) struct PendingRead {
    pub(super) file: File,
    pub(super) position: u64,
    pub(super) buffer: Vec<u8>,
    /// Number of bytes read so far, or the error that ended the read.
    pub(super) result: Result<usize>,
    /// Set if the next byte cannot be read: the read ends before it.
    is_cut: bool,
}

impl PendingRead {
    pub(super) fn new(file: File, position: u64, buffer: Vec<u8>) -> Self {
        Self { file, position, buffer, result: Ok(0), is_cut: false }
    }

    /// Returns the bytes that were read, or the error.
    pub(super) fn into_result(mut self) -> Result<Vec<u8>> {
        self.buffer.truncate(self.result?);
        Ok(self.buffer)
    }

    pub(super) fn done(&self) -> usize {
        *self.result.as_ref().unwrap_or(&self.buffer.len())
    }

    /// Returns `true` if nothing more will be read. A read in one page is whole after its first
    /// bytes: bytes appended since belong to later writes.
    pub(super) fn is_finished(&self) -> bool {
        let done = self.done();
        let is_whole = done > 0 && is_in_one_page(self.position, self.buffer.len() as u64);
        self.is_cut || is_whole || done == self.buffer.len()
    }

    pub(super) fn as_request<R>(&mut self, work: impl FnOnce(&mut ReadRequest<'_>) -> R) -> R {
        let mut request = ReadRequest::new(self.position, &mut self.buffer);
        request.result = std::mem::replace(&mut self.result, Ok(0));
        let answer = work(&mut request);
        self.result = request.result;
        answer
    }

    /// Copies what is resident. Returns the obstacle at the next byte, unless the read is finished.
    pub(super) fn read_available(&mut self) -> Obstacle {
        if self.is_finished() {
            return Obstacle::None;
        }
        let done = self.done();
        let at = self.position + done as u64;
        let (copied, obstacle) = self.file.read_available(&mut self.buffer[done..], at);
        self.result = Ok(done + copied);
        obstacle
    }

    /// Ends the read with `error`, or before the byte that it is about.
    pub(super) fn fail(&mut self, error: Error) {
        if self.done() == 0 {
            self.result = Err(error);
        }
        self.is_cut = true;
    }
}
