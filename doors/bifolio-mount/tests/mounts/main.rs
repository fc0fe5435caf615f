//! Directories mounted by the program, and what other programs do in them.
//!
//! Needs `/dev/fuse`, and for most tests root. The tests that are ignored by default are the long
//! runs of other people's suites: `cargo x check-doors mount --whole`.
#![allow(missing_docs)]

mod background;
mod bounds;
mod claims;
mod contents;
mod ends;
mod faults;
mod full;
mod hangs;
mod kills;
mod maps;
mod mounted;
mod names;
mod suites;
mod times;
mod unprivileged;
mod xattrs;
