//! Runs of bytes of a file, to and from one contiguous buffer; whole rows are [`Ranges`].
//!
//! A [`Pattern`] is what an index of an array comes down to: positions, and at each of them a
//! number of runs at equal distances. Each step moves as many runs as one call should: their reads
//! are one batch, so that the device has many of them at a time. Runs that touch each other are one
//! read. Runs that lie close together are read with the bytes between them, into a buffer of
//! bounded size, and copied from there.

use bifolio::{File, ReadRequest, Result};
use pyo3::PyResult;
use pyo3::exceptions::PyValueError;

/// Most reads of one batch.
const REQUESTS_MAX: usize = 4096;
/// Most bytes of one step, unless a single run is longer.
const STEP_BYTES_MAX: usize = 16 << 20;
/// Most unused bytes between two runs that are read together: fewer are cheaper to copy than
/// another request is.
const GAP_BYTES_MAX: u64 = 512;
/// Most bytes of runs that are read with the bytes between them, at a time.
const STAGED_BYTES_MAX: usize = 1 << 20;

/// Reads at `position` until `buffer` is full or the file ends. Returns the number of bytes.
pub(crate) fn read_full(file: &File, buffer: &mut [u8], position: u64) -> Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], position + done as u64)? {
            0 => break,
            count => done += count,
        }
    }
    Ok(done)
}

/// The runs that are left of a transfer.
#[derive(Debug)]
pub(crate) struct Pattern {
    positions: Vec<u64>,
    /// Runs at each position.
    count: usize,
    /// Distance of the starts of two runs, bytes; negative for runs in descending order.
    stride: i64,
    /// Length of a run, bytes.
    run: usize,
    /// Index of the next position.
    next_position: usize,
    /// Runs of it that are done.
    runs_done: usize,
    staging: Vec<u8>,
}

/// Runs that are one read: `runs` of them at `position`, the lowest of their positions.
#[derive(Clone, Copy, Debug)]
struct Piece {
    position: u64,
    runs: usize,
    /// Bytes from the first byte of the lowest run to the last byte of the highest one.
    span: usize,
}

impl Pattern {
    /// Creates the pattern of a transfer.
    ///
    /// # Errors
    /// Runs whose bytes are not those of the buffer; a run that starts before the file.
    pub(crate) fn new(
        positions: Vec<u64>,
        count: usize,
        stride: i64,
        run: usize,
        buffer_bytes: usize,
    ) -> PyResult<Self> {
        let bytes = count.checked_mul(run).and_then(|bytes| bytes.checked_mul(positions.len()));
        if bytes != Some(buffer_bytes) {
            return Err(PyValueError::new_err("the buffer does not have the length of the runs"));
        }
        let reach =
            i64::try_from(count).ok().and_then(|count| stride.checked_mul((count - 1).max(0)));
        let fits = |reach: i64| {
            positions.iter().all(|position| {
                let last = position.checked_add_signed(reach);
                last.is_some_and(|last| last.checked_add(run as u64).is_some())
            })
        };
        if !reach.is_some_and(fits) {
            return Err(PyValueError::new_err("a run lies outside of any file"));
        }
        let (next_position, runs_done, staging) = (0, 0, Vec::new());
        Ok(Self { positions, count, stride, run, next_position, runs_done, staging })
    }

    /// Returns `true` if the runs at a position touch each other.
    fn is_contiguous(&self) -> bool {
        self.count == 1 || self.stride == self.run as i64
    }

    /// Returns `true` if the runs at a position are read with the bytes between them.
    fn is_dense(&self) -> bool {
        !self.is_contiguous()
            && self.stride.unsigned_abs().saturating_sub(self.run as u64) <= GAP_BYTES_MAX
            && self.stride.unsigned_abs() as usize <= STAGED_BYTES_MAX
    }

    /// Returns the position of a run at the next position.
    fn position_of(&self, run: usize) -> u64 {
        self.positions[self.next_position].wrapping_add_signed(self.stride * run as i64)
    }

    fn advance(&mut self, runs: usize) {
        self.runs_done += runs;
        if self.runs_done == self.count {
            (self.next_position, self.runs_done) = (self.next_position + 1, 0);
        }
    }

    /// Takes the next runs that are one piece, of at most `runs_max` runs.
    fn take_piece(&mut self, runs_max: usize, staged: bool) -> Option<Piece> {
        if self.next_position == self.positions.len() {
            return None;
        }
        let left = (self.count - self.runs_done).min(runs_max);
        let first = self.position_of(self.runs_done);
        if staged {
            let step = self.stride.unsigned_abs() as usize;
            let runs = left.min((STAGED_BYTES_MAX - step.min(STAGED_BYTES_MAX)) / step.max(1) + 1);
            let last = self.position_of(self.runs_done + runs - 1);
            self.advance(runs);
            let span = first.abs_diff(last) as usize + self.run;
            return Some(Piece { position: first.min(last), runs, span });
        }
        let runs = if self.is_contiguous() { left } else { 1 };
        self.advance(runs);
        let mut piece = Piece { position: first, runs, span: runs * self.run };
        // The next positions may continue where this one ends.
        while piece.runs < runs_max
            && self.next_position < self.positions.len()
            && self.runs_done == 0
            && self.position_of(0) == piece.position + piece.span as u64
            && (self.is_contiguous() || self.count == 1)
            && piece.runs + self.count <= runs_max
        {
            self.advance(self.count);
            piece.runs += self.count;
            piece.span += self.count * self.run;
        }
        Some(piece)
    }

    /// Takes the pieces of one step, for a buffer with room for `room` bytes.
    fn take_step(&mut self, room: usize, staged: bool) -> Vec<Piece> {
        let (mut pieces, mut runs, mut staged_bytes) = (Vec::new(), 0, 0);
        let runs_max = (room.min(STEP_BYTES_MAX) / self.run.max(1)).max(1);
        while runs < runs_max && pieces.len() < REQUESTS_MAX && staged_bytes < STAGED_BYTES_MAX {
            let Some(piece) = self.take_piece(runs_max - runs, staged) else { break };
            runs += piece.runs;
            staged_bytes += if staged { piece.span } else { 0 };
            pieces.push(piece);
        }
        pieces
    }

    /// Reads the next runs to the start of `buffer`. Returns the number of bytes.
    ///
    /// # Errors
    /// As [`File::read_exact_at`], for the first run that cannot be read.
    pub(crate) fn read(&mut self, file: &File, buffer: &mut [u8]) -> Result<usize> {
        let is_dense = self.is_dense();
        let pieces = self.take_step(buffer.len(), is_dense);
        if !is_dense {
            return read_pieces(file, &pieces, buffer);
        }
        let spans = pieces.iter().map(|piece| piece.span).sum();
        let mut staging = std::mem::take(&mut self.staging);
        staging.resize(spans, 0);
        read_pieces(file, &pieces, &mut staging)?;
        let mut targets = buffer.chunks_exact_mut(self.run);
        let (mut spans, mut done) = (&staging[..], 0);
        let step = self.stride.unsigned_abs() as usize;
        for piece in &pieces {
            let (span, rest) = spans.split_at(piece.span);
            for number in 0..piece.runs {
                let from_low = if self.stride < 0 { piece.runs - 1 - number } else { number };
                if let Some(target) = targets.next() {
                    target.copy_from_slice(&span[from_low * step..][..self.run]);
                }
            }
            (spans, done) = (rest, done + piece.runs * self.run);
        }
        self.staging = staging;
        Ok(done)
    }

    /// Writes the next runs from the start of `buffer`. Returns the number of bytes.
    ///
    /// # Errors
    /// As [`File::write_all_at`]; the runs before are written.
    pub(crate) fn write(&mut self, file: &File, buffer: &[u8]) -> Result<usize> {
        let mut done = 0;
        for piece in self.take_step(buffer.len(), false) {
            file.write_all_at(&buffer[done..done + piece.span], piece.position)?;
            done += piece.span;
        }
        Ok(done)
    }
}

/// Reads all pieces as one batch, one after the other to the start of `buffer`. Returns the number
/// of bytes.
fn read_pieces(file: &File, pieces: &[Piece], buffer: &mut [u8]) -> Result<usize> {
    let mut left = buffer;
    let mut requests = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let (target, rest) = left.split_at_mut(piece.span);
        requests.push(ReadRequest::new(target, piece.position));
        left = rest;
    }
    read_requests(file, requests)
}

/// Reads as one batch. Returns the number of bytes.
fn read_requests(file: &File, mut requests: Vec<ReadRequest<'_>>) -> Result<usize> {
    if let [ReadRequest { position, buffer, .. }] = &mut requests[..] {
        file.read_exact_at(buffer, *position)?;
        return Ok(buffer.len());
    }
    file.read_many(&mut requests)?;
    let mut done = 0;
    for request in requests {
        let count = request.result?;
        if count < request.buffer.len() {
            // The end of the file, or a byte that cannot be read: this read says which.
            let rest = &mut request.buffer[count..];
            file.read_exact_at(rest, request.position + count as u64)?;
        }
        done += request.buffer.len();
    }
    Ok(done)
}

/// The ranges of bytes that are left of a transfer, none of them empty.
#[derive(Debug)]
pub(crate) struct Ranges {
    positions: Vec<u64>,
    lengths: Lengths,
    /// Index of the next range.
    next: usize,
    /// Bytes of it that are done.
    done: usize,
}

/// Lengths of ranges, bytes.
#[derive(Debug)]
pub(crate) enum Lengths {
    Same(usize),
    Each(Vec<usize>),
}

impl Ranges {
    /// Creates the transfer of ranges that start at `positions`.
    pub(crate) fn new(positions: Vec<u64>, lengths: Lengths) -> Self {
        Self { positions, lengths, next: 0, done: 0 }
    }

    /// Returns the number of bytes that are left, before the first read.
    pub(crate) fn bytes(&self) -> usize {
        match &self.lengths {
            Lengths::Same(length) => length.saturating_mul(self.positions.len()),
            Lengths::Each(lengths) => lengths.iter().sum(),
        }
    }

    /// Returns the position of the range, if there is only one.
    pub(crate) fn only(&self) -> Option<u64> {
        if let [position] = self.positions[..] { Some(position) } else { None }
    }

    fn length(&self, range: usize) -> usize {
        match &self.lengths {
            Lengths::Same(length) => *length,
            Lengths::Each(lengths) => lengths[range],
        }
    }

    /// Takes the next bytes that follow each other in the file, at most `bytes_max`. Returns their
    /// position and number.
    fn take(&mut self, bytes_max: usize) -> Option<(u64, usize)> {
        let position = self.positions.get(self.next)? + self.done as u64;
        let mut bytes = 0;
        while bytes < bytes_max
            && let Some(next) = self.positions.get(self.next)
            && next + self.done as u64 == position + bytes as u64
        {
            let left = self.length(self.next) - self.done;
            let part = left.min(bytes_max - bytes);
            bytes += part;
            (self.next, self.done) =
                if part == left { (self.next + 1, 0) } else { (self.next, self.done + part) };
        }
        Some((position, bytes))
    }

    /// Reads the next ranges to the start of `buffer`. Returns the number of bytes.
    ///
    /// # Errors
    /// As [`File::read_exact_at`], for the first range that cannot be read.
    pub(crate) fn read(&mut self, file: &File, buffer: &mut [u8]) -> Result<usize> {
        let mut requests = Vec::with_capacity((self.positions.len() - self.next).min(REQUESTS_MAX));
        let (mut left, mut bytes_left) = (buffer, STEP_BYTES_MAX);
        while requests.len() < REQUESTS_MAX && bytes_left > 0 {
            let Some((position, bytes)) = self.take(bytes_left.min(left.len())) else { break };
            let (target, rest) = std::mem::take(&mut left).split_at_mut(bytes);
            requests.push(ReadRequest::new(target, position));
            (left, bytes_left) = (rest, bytes_left - bytes);
        }
        read_requests(file, requests)
    }

    /// Starts to read the ranges, all of one length, into the cache, in the order of the file, and
    /// does not wait.
    ///
    /// # Errors
    /// As [`File::prefetch_many`], which limits them.
    pub(crate) fn prefetch(mut self, file: &File) -> Result<()> {
        self.positions.sort_unstable();
        let next = || self.take(usize::MAX);
        let ranges = std::iter::from_fn(next);
        file.prefetch_many(ranges.map(|(position, bytes)| position..position + bytes as u64))
    }
}
