//! A named way to read a file, and one trial of it.
//!
//! [`ReadPath`] is generic, so that the loop around each way is compiled for it; [`Series`] hides
//! the type, so that a benchmark is a list of them.

use std::path::Path;
use std::time::Duration;

use super::interleave::Sample;
use super::threads::run_pinned;
use super::timed::{Positions, ReadPath, Window, read_blocks};
use super::verify::verify;
use crate::error::{Error, Result};

/// The reads of one trial.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load<'a> {
    /// Block size: one of the sizes the loop is compiled for.
    pub(crate) block_bytes: u64,
    /// Upper bound of the positions.
    pub(crate) extent_bytes: u64,
    /// CPUs, with one thread each.
    pub(crate) cpus: &'a [usize],
    /// Duration.
    pub(crate) duration: Duration,
}

/// A named way to read a file.
pub(crate) struct Series {
    pub(crate) name: &'static str,
    path: Box<dyn AnyPath>,
}

impl Series {
    pub(crate) fn new(name: &'static str, path: impl ReadPath + 'static) -> Self {
        Self { name, path: Box::new(path) }
    }

    /// Runs one trial.
    pub(crate) fn run(&self, load: &Load<'_>) -> Result<Sample> {
        match load.block_bytes {
            8 => self.path.run_8(self.name, load),
            64 => self.path.run_64(self.name, load),
            4096 => self.path.run_4096(self.name, load),
            other => Err(Error::Refused(format!("no loop for blocks of {other} bytes"))),
        }
    }

    /// Compares every byte of `file` with the bytes read by this series, page by page, and the
    /// first page also in 64-byte blocks. Returns the number of bytes compared.
    pub(crate) fn verify(&self, file: &Path, threads: usize) -> Result<u64> {
        self.path.verify(self.name, file, threads)
    }
}

trait AnyPath {
    fn run_8(&self, series: &str, load: &Load<'_>) -> Result<Sample>;
    fn run_64(&self, series: &str, load: &Load<'_>) -> Result<Sample>;
    fn run_4096(&self, series: &str, load: &Load<'_>) -> Result<Sample>;
    fn verify(&self, series: &str, file: &Path, threads: usize) -> Result<u64>;
}

impl<P: ReadPath> AnyPath for P {
    fn run_8(&self, series: &str, load: &Load<'_>) -> Result<Sample> {
        run::<8, P>(self, series, load)
    }

    fn run_64(&self, series: &str, load: &Load<'_>) -> Result<Sample> {
        run::<64, P>(self, series, load)
    }

    fn run_4096(&self, series: &str, load: &Load<'_>) -> Result<Sample> {
        run::<4096, P>(self, series, load)
    }

    fn verify(&self, series: &str, file: &Path, threads: usize) -> Result<u64> {
        let pages_bytes = verify::<4096, P>(self, series, file, u64::MAX, threads)?;
        Ok(pages_bytes + verify::<64, P>(self, series, file, 4096, 1)?)
    }
}

fn run<const BLOCK: usize, P: ReadPath>(path: &P, series: &str, load: &Load<'_>) -> Result<Sample> {
    let before = path.counters();
    let windows = run_pinned(
        load.cpus,
        |index| Ok((path.reader()?, Positions::new(load.extent_bytes, BLOCK as u64, index as u64))),
        |(mut reader, positions)| {
            read_blocks::<BLOCK, _>(&mut reader, positions, load.duration, series)
        },
    )?;
    let after = path.counters();
    let operations = windows.iter().map(|window| window.operations).sum();
    let mut counts: Vec<_> = after
        .iter()
        .zip(&before)
        .map(|((name, after), (_, before))| (*name, after.saturating_sub(*before)))
        .collect();
    if let Some(syscalls) = P::SYSCALLS_PER_READ {
        counts.push(("syscalls", operations * syscalls));
    }
    Ok(Sample { value: windows.iter().map(Window::rate).sum(), operations, counts })
}
