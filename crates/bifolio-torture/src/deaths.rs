//! Prints the command that repeats a scene when a signal kills the program: SIGBUS of a map, or an
//! abort; and why a page of a map was refused, if one was.
//!
//! # Safety
//! The handler only reads atomics, formats into its own stack and calls `write` and `signal`, which
//! a handler may. It has the signature that `signal` requires, and lives as long as the program.
#![allow(unsafe_code)]

use crate::scene::{CLASSES, Class};
use std::io::Write as _;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// Class of the current scene.
static CLASS: AtomicU64 = AtomicU64::new(0);
static SEED: AtomicU64 = AtomicU64::new(0);
/// The last refusal of a page of a map. Refusals are few, and none is freed.
static REFUSAL: AtomicPtr<String> = AtomicPtr::new(ptr::null_mut());

/// Keeps what the library logs about refused pages.
struct Refusals;

impl log::Log for Refusals {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() == log::Level::Error && metadata.target().starts_with("bifolio::maps")
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            let line = Box::leak(Box::new(format!("{}\n", record.args())));
            // Release: pairs with the Acquire in `tell`.
            REFUSAL.store(line, Ordering::Release);
        }
    }

    fn flush(&self) {}
}

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
    if log::set_logger(&Refusals).is_ok() {
        log::set_max_level(log::LevelFilter::Error);
    }
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
    // Acquire: pairs with the Release in `log`.
    // SAFETY: null, or a line that lives as long as the program.
    if let Some(line) = unsafe { REFUSAL.load(Ordering::Acquire).as_ref() } {
        // SAFETY: as above.
        unsafe { libc::write(1, line.as_ptr().cast(), line.len()) };
    }
    // SAFETY: no handler is given. The instruction is made again, and the signal comes once more.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}
