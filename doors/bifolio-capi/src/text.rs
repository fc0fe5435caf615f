//! Version, features and counters as text; the log.
//!
//! Text is copied to a buffer of the caller like `snprintf` does: truncated to fit, with a zero
//! byte at its end; the length is that of the whole text.
//!
//! # Safety
//! Dereferences what C hands over, under the contract of the crate's head; calls a function of the
//! caller for each line of the log.
#![allow(unsafe_code)]

use crate::boundary::{Failure, guard, handle};
use crate::cache::bifolio_cache;
use crate::names;
use crate::result::bifolio_result;
use log::{Level, LevelFilter, Log, Metadata, Record};
use std::ffi::{CString, c_char, c_void};
use std::fmt::Write;
use std::sync::{Mutex, PoisonError};

/// Returns the version of the library, such as "0.1.0". Valid forever.
///
/// Threads: any. Blocks: never.
#[unsafe(no_mangle)]
pub extern "C" fn bifolio_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Writes to `buffer` which features of the kernel were found on this machine, one per line, and
/// the fallbacks of missing ones. With a null `cache` it probes again; otherwise it reports what
/// that cache uses. At most `capacity` bytes are written, the last of them zero; `length`, which
/// may be null, gets the length of the text without the zero byte, so a `capacity` of 0 asks for
/// it.
///
/// Threads: any, at the same time. Blocks: for the kernel, if `cache` is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_features(
    cache: *const bifolio_cache,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let cache = unsafe { cache.as_ref() };
        let reports = cache.map_or_else(bifolio::features, |cache| cache.cache().features());
        let mut text = String::new();
        for report in reports {
            let _ = if report.in_use {
                writeln!(text, "{}: in use: {}", report.name, report.reason)
            } else {
                writeln!(
                    text,
                    "{}: not in use: {}; {}",
                    report.name, report.reason, report.fallback
                )
            };
        }
        // SAFETY: the caller's buffer, and null or the caller's variable.
        unsafe { write_text(&text, buffer, capacity, length) }
    })
}

/// Writes to `buffer` all counters of the cache, as "name value" lines, then its devices and the
/// fallbacks in use. For people: names may change from version to version. `buffer`, `capacity` and
/// `length` are as for `bifolio_features`.
///
/// Threads: any, at the same time. Blocks: as `bifolio_cache_stats`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_cache_stats_text(
    cache: *const bifolio_cache,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> bifolio_result {
    guard(|| {
        // SAFETY: null, or a live handle.
        let stats = unsafe { handle(cache, "cache")? }.cache().stats();
        let mut text = String::new();
        for (name, value) in stats.counts().into_iter().chain(stats.levels()) {
            let _ = writeln!(text, "{name} {value}");
        }
        for device in &stats.devices {
            let error = device.last_error.as_deref().unwrap_or("none");
            let state = if device.is_stuck { "stuck" } else { "writable" };
            let _ = writeln!(
                text,
                "device of {}: {} of {} bytes dirty, {state}, last error: {error}",
                device.first_file, device.dirty_bytes, device.dirty_bytes_max
            );
        }
        for fallback in &stats.fallbacks {
            let _ = writeln!(text, "fallback: {fallback}");
        }
        // SAFETY: the caller's buffer, and null or the caller's variable.
        unsafe { write_text(&text, buffer, capacity, length) }
    })
}

/// # Safety
/// `buffer` is null or has `capacity` bytes that can be written; `length` is null or a variable.
unsafe fn write_text(
    text: &str,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> Result<(), Failure> {
    if buffer.is_null() && capacity > 0 {
        return Err(Failure::Null("buffer"));
    }
    if let Some(room) = capacity.checked_sub(1) {
        let copied = room.min(text.len());
        // SAFETY: `copied` bytes are in both, which do not overlap.
        unsafe { text.as_ptr().copy_to_nonoverlapping(buffer.cast(), copied) };
        let end = buffer.wrapping_add(copied);
        // SAFETY: `copied` is less than `capacity`.
        unsafe { end.write(0) };
    }
    if !length.is_null() {
        // SAFETY: the caller's variable.
        unsafe { length.write(text.len()) };
    }
    Ok(())
}

/// Levels of the log.
#[repr(u32)]
#[derive(Clone, Copy, Debug)]
pub enum bifolio_log_level {
    /// Nothing is logged.
    BIFOLIO_LOG_OFF = 0,
    /// Lost bytes: write-outs that failed after the last handle was closed.
    BIFOLIO_LOG_ERROR = 1,
    /// Degraded operation.
    BIFOLIO_LOG_WARN = 2,
    /// Events that happen once per cache.
    BIFOLIO_LOG_INFO = 3,
}

/// A function that receives a line of the log: its level, and text that is valid during the call
/// only. It is called by any thread, one line at a time, and must not call the library. It must not
/// throw: an exception that leaves it ends the process. Declare it `noexcept` in C++.
pub type bifolio_log_function =
    Option<unsafe extern "C" fn(context: *mut c_void, level: u32, message: *const c_char)>;

/// Sends the library's log, for the whole process, to `function`, up to `level`, with `context` as
/// its first argument. A null function ends that. Without it nothing is logged; a program that
/// drops files and caches without closing them learns of lost bytes only here.
///
/// Threads: any. Blocks: while a line is being logged.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifolio_set_log(
    function: bifolio_log_function,
    context: *mut c_void,
    level: u32,
) -> bifolio_result {
    guard(|| {
        let table = [
            (bifolio_log_level::BIFOLIO_LOG_OFF as u32, LevelFilter::Off),
            (bifolio_log_level::BIFOLIO_LOG_ERROR as u32, LevelFilter::Error),
            (bifolio_log_level::BIFOLIO_LOG_WARN as u32, LevelFilter::Warn),
            (bifolio_log_level::BIFOLIO_LOG_INFO as u32, LevelFilter::Info),
        ];
        let level = crate::boundary::choice(level, &table, "level")?;
        let mut target = TARGET.lock().unwrap_or_else(PoisonError::into_inner);
        *target = function.map(|function| Target { function, context });
        // Fails if it is installed already, by an earlier call.
        let _ = log::set_logger(&LOGGER);
        log::set_max_level(if target.is_some() { level } else { LevelFilter::Off });
        Ok(())
    })
}

struct Target {
    function: unsafe extern "C" fn(*mut c_void, u32, *const c_char),
    context: *mut c_void,
}

// SAFETY: the header asks for a function and a context that any thread may use.
unsafe impl Send for Target {}

static TARGET: Mutex<Option<Target>> = Mutex::new(None);
static LOGGER: Logger = Logger;

struct Logger;

impl Log for Logger {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let level = match record.level() {
            Level::Error => bifolio_log_level::BIFOLIO_LOG_ERROR,
            Level::Warn => bifolio_log_level::BIFOLIO_LOG_WARN,
            Level::Info | Level::Debug | Level::Trace => bifolio_log_level::BIFOLIO_LOG_INFO,
        };
        let message = names::in_c(&record.args().to_string()).replace('\0', "?");
        let message = CString::new(message).unwrap_or_default();
        let target = TARGET.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(target) = target.as_ref() {
            // SAFETY: the caller's function, with the arguments that its type has.
            unsafe { (target.function)(target.context, level as u32, message.as_ptr()) }
        }
    }

    fn flush(&self) {}
}
