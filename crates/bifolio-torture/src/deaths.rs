//! Prints the command that repeats a scene when a signal kills the program: SIGBUS of a map, or an
//! abort.
//!
//! # Safety
//! The handler only reads atomics, formats into its own stack and calls `write` and `signal`, which
//! a handler may. It has the signature that `signal` requires, and lives as long as the program.
#![allow(unsafe_code)]

use crate::scene::{CLASSES, Class};
use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

/// Class of the current scene.
static CLASS: AtomicU64 = AtomicU64::new(0);
static SEED: AtomicU64 = AtomicU64::new(0);

/// Records the current scene.
pub fn note(class: Class, seed: u64) {
    let number = CLASSES.iter().position(|other| *other == class).unwrap_or(0);
    CLASS.store(number as u64, Ordering::Relaxed);
    SEED.store(seed, Ordering::Relaxed);
}

/// Returns the word of the class of the current scene, and its seed.
pub fn scene() -> (&'static str, u64) {
    let class = CLASSES[CLASS.load(Ordering::Relaxed) as usize].word();
    (class, SEED.load(Ordering::Relaxed))
}

/// Installs the handler.
pub fn watch() {
    let handler = tell as extern "C" fn(libc::c_int);
    for signal in [libc::SIGBUS, libc::SIGSEGV, libc::SIGABRT, libc::SIGILL] {
        // SAFETY: a handler as the head of the file says.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
}

/// Prints the command, and raises the signal again.
extern "C" fn tell(signal: libc::c_int) {
    let mut text = [0_u8; 200];
    let mut rest = &mut text[..];
    let (class, seed) = scene();
    let _ = writeln!(
        rest,
        "torture: died by signal {signal} in class {class}, seed {seed}\n\
         again: cargo x torture --only {class} --seed {seed}"
    );
    let length = 200 - rest.len();
    // SAFETY: a buffer of ours that is longer than that.
    unsafe { libc::write(1, text.as_ptr().cast(), length) };
    // SAFETY: no handler is given. The instruction is made again, and the signal comes once more.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}
