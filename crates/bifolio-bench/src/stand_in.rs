//! A stand-in for what memory files will be built with, until the library has it.
//!
//! The trait has the names of the methods to come, so that this file, its `mod` line and the `use`
//! lines that name it are all there is to remove. Modes are ignored.

use bifolio::{CacheBuilder, File};

/// `bifolio::ReadMode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadMode {
    Batched,
    OneByOne,
    LockedOneByOne,
}

/// Methods of `CacheBuilder`.
pub(crate) trait BuilderStandIn {
    fn read_mode(self, mode: ReadMode) -> Self;
}

impl BuilderStandIn for CacheBuilder {
    fn read_mode(self, _mode: ReadMode) -> Self {
        self
    }
}

/// The share of neighbouring pages of `file` that lie on neighbouring frames.
pub(crate) fn contiguity_of(_file: &File) -> Option<f64> {
    None
}
