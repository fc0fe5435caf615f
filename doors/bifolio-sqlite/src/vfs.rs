//! The VFS: its treatment of each kind of file, and the entry points of the extension.
//!
//! A main database becomes a [`Connection`] to a [`Shared`] file, and a temporary file of a
//! statement is in the cache (`temporary`). Every other file is opened by the system's VFS, in the
//! memory that SQLite allocated for this VFS, so that its calls bypass this crate: journals and
//! logs are written in order and synced, and the kernel keeps what a killed process wrote.
//!
//! # Safety
//! `xOpen` gets memory of `file_size` bytes for a file, which holds [`Opened`] or a file of the
//! system's VFS. The VFS and its name are leaked, since SQLite keeps them.
#![allow(unsafe_code)]

use crate::connection::Connection;
use crate::descriptors::Key;
use crate::fork;
use crate::methods;
use crate::name::FileName;
use crate::refused::{self, OpenFailure, Refusal};
use crate::settings::{self, Settings};
use crate::share;
use crate::shared::{self, Shared};
use crate::sqlite::{self, Api, File, Vfs};
use crate::temporary;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::ptr;

/// The name of the VFS.
const NAME: &CStr = c"bifolio";
/// The variable of the environment that makes the VFS the default if it is 1.
const DEFAULT_VARIABLE: &str = "BIFOLIO_DEFAULT";
/// The first version whose table has all the functions that are called: 3.8.7.
const VERSION_MIN: c_int = 3_008_007;

/// A file of this VFS.
#[repr(C)]
pub(crate) struct Opened {
    pub(crate) base: File,
    /// A [`Connection`], or a [`Refusal`].
    pub(crate) data: *mut c_void,
}

/// The library that the VFS is registered in, and the system's VFS.
pub(crate) struct Home {
    pub(crate) api: Api,
    system: *mut Vfs,
}

/// The entry point that SQLite derives from the file name `libbifolio_sqlite.so`.
///
/// # Safety
/// SQLite calls it, with the table of its functions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sqlite3_bifoliosqlite_init(
    _connection: *mut c_void,
    message: *mut *mut c_char,
    table: *const *const c_void,
) -> c_int {
    let is_default = std::env::var_os(DEFAULT_VARIABLE).is_some_and(|value| value == "1");
    // SAFETY: the same contract.
    unsafe { load(message, table, is_default) }
}

/// The entry point that makes the VFS the default: databases that are opened from then on without
/// the name of a VFS use it.
///
/// # Safety
/// As for [`sqlite3_bifoliosqlite_init`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sqlite3_bifoliodefault_init(
    _connection: *mut c_void,
    message: *mut *mut c_char,
    table: *const *const c_void,
) -> c_int {
    // SAFETY: the same contract.
    unsafe { load(message, table, true) }
}

/// # Safety
/// The arguments of an entry point, from SQLite.
unsafe fn load(message: *mut *mut c_char, table: *const *const c_void, is_default: bool) -> c_int {
    if table.is_null() {
        return sqlite::ERROR;
    }
    // SAFETY: the table that SQLite gives to extensions.
    let api = unsafe { Api::new(table) };
    match catch_unwind(AssertUnwindSafe(|| register(api, is_default))) {
        // For SQLite's loader and for `sqlite3_auto_extension`, which takes no other answer. The
        // library stays loaded all the same: `build.rs`.
        Ok(Ok(())) => sqlite::OK,
        Ok(Err(problem)) => {
            if !message.is_null() {
                // SAFETY: the caller's variable, whose text SQLite frees.
                unsafe { message.write(api.text(&problem)) };
            }
            sqlite::ERROR
        }
        Err(_) => sqlite::ERROR,
    }
}

/// The entry point that SQLite tries first, whatever the name of the file.
///
/// # Safety
/// As for [`sqlite3_bifoliosqlite_init`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sqlite3_extension_init(
    connection: *mut c_void,
    message: *mut *mut c_char,
    table: *const *const c_void,
) -> c_int {
    // SAFETY: the same contract.
    unsafe { sqlite3_bifoliosqlite_init(connection, message, table) }
}

/// Registers the VFS, or makes a registered one the default if `is_default`.
fn register(api: Api, is_default: bool) -> Result<(), String> {
    if api.version() < VERSION_MIN {
        return Err(format!("bifolio needs SQLite 3.8.7, and this is {}", api.version()));
    }
    let registered = api.vfs_find(Some(NAME));
    let vfs = if registered.is_null() { create(api)? } else { registered };
    match api.auto_extension(refused::report) {
        sqlite::OK if !registered.is_null() && !is_default => return Ok(()),
        sqlite::OK => {}
        code => return Err(format!("SQLite does not take an entry point: error {code}")),
    }
    fork::watch();
    // SAFETY: `create` leaked it.
    match unsafe { api.vfs_register(vfs, is_default) } {
        sqlite::OK => Ok(()),
        code => Err(format!("SQLite does not take the VFS: error {code}")),
    }
}

/// Creates the VFS, which lives as long as the process.
fn create(api: Api) -> Result<*mut Vfs, String> {
    let system = api.vfs_find(Some(c"unix"));
    if system.is_null() {
        return Err("bifolio needs the VFS \"unix\", and there is none".to_owned());
    }
    // SAFETY: registered VFSs live as long as the library.
    let Vfs { file_size, path_max, .. } = unsafe { *system };
    let home = Box::leak(Box::new(Home { api, system }));
    let vfs = Box::leak(Box::new(Vfs {
        version: 2,
        file_size: file_size.max(size_of::<Opened>() as c_int),
        path_max,
        next: ptr::null_mut(),
        name: NAME.as_ptr(),
        data: ptr::from_mut(home).cast(),
        open,
        delete,
        access,
        full_pathname,
        dl_open,
        dl_error,
        dl_sym,
        dl_close,
        randomness,
        sleep,
        current_time,
        last_error,
        current_time_ms: Some(current_time_ms),
        set_system_call: ptr::null(),
        get_system_call: ptr::null(),
        next_system_call: ptr::null(),
    }));
    Ok(vfs)
}

/// # Safety
/// A VFS that [`create`] made.
unsafe fn home<'a>(vfs: *mut Vfs) -> &'a Home {
    // SAFETY: a live VFS, by the contract.
    let data = unsafe { (*vfs).data };
    // SAFETY: `create` leaked it.
    unsafe { &*data.cast::<Home>() }
}

/// Returns `true` if other processes are to be kept out of a database: as it is open in this one,
/// or as `settings` ask. `found` is what the path names. No connection is opened or closed
/// meanwhile.
fn is_exclusive(path: &Path, found: Option<Key>, settings: &Settings) -> Result<bool, OpenFailure> {
    let is_exclusive = match found.map(|key| (shared::is_open(key), share::is_open(key))) {
        None | Some((false, false)) => settings.is_exclusive(),
        Some((is_exclusive, _)) => is_exclusive,
    };
    settings.check_exclusive(is_exclusive).map_err(|problem| {
        let text = format!("{}: {problem}", path.display());
        OpenFailure::Refused(Refusal { code: sqlite::MISUSE, text })
    })?;
    Ok(is_exclusive)
}

/// Opens a file that is no main database.
///
/// # Safety
/// The arguments of `xOpen`.
unsafe fn open_other(
    home: &Home,
    name: *const c_char,
    file: *mut File,
    flags: c_int,
    flags_out: *mut c_int,
) -> c_int {
    // SAFETY: registered VFSs live as long as the library.
    let system_open = unsafe { (*home.system).open };
    // SAFETY: the contract; there is more memory than the system's VFS needs.
    let code = unsafe { system_open(home.system, name, file, flags, flags_out) };
    if code == sqlite::OK && name.is_null() {
        // SAFETY: just opened by the system's VFS.
        let take_over = || unsafe { temporary::take_over(home.api, file, flags) };
        // A panic leaves the system's file, which is as good.
        let _ = catch_unwind(AssertUnwindSafe(take_over));
    }
    code
}

unsafe extern "C" fn open(
    vfs: *mut Vfs,
    name: *const c_char,
    file: *mut File,
    flags: c_int,
    flags_out: *mut c_int,
) -> c_int {
    // SAFETY: SQLite calls with the VFS that was registered.
    let home = unsafe { home(vfs) };
    if flags & sqlite::OPEN_MAIN_DB == 0 || name.is_null() {
        // SAFETY: the arguments of this call.
        return unsafe { open_other(home, name, file, flags, flags_out) };
    }
    // SAFETY: the memory that SQLite has for a file; a null table means that there is nothing to
    // close.
    unsafe { (*file).methods = ptr::null() };
    let body = || {
        // SAFETY: the name that SQLite gave for a main database.
        let copy = || unsafe { FileName::copy(name) };
        let given = copy();
        let settings = Settings::new(given.parameters())
            .map_err(|text| OpenFailure::Refused(Refusal { code: sqlite::MISUSE, text }))?;
        let path = given.path().to_owned();
        let _alone = share::opening().lock();
        let found = Key::of(&path);
        if !is_exclusive(&path, found, &settings)? {
            let (api, system, name) = (home.api, home.system, (copy, found));
            // SAFETY: the system's VFS is registered.
            let opened = unsafe { share::Connection::open(api, system, name, flags, &settings) };
            let (connection, flags) = opened?;
            // SAFETY: the memory that SQLite has for a file.
            unsafe { methods::open(file, connection) };
            return Ok(flags);
        }
        // SAFETY: the system's VFS is registered.
        let joined = unsafe { Shared::open(home.api, home.system, copy, flags, &settings) };
        let (shared, flags) = joined?;
        let is_writable = flags & sqlite::OPEN_READONLY == 0;
        let is_powersafe = given.parameters().find(|(key, _)| *key == "psow");
        let is_powersafe = is_powersafe.map(|(_, value)| settings::is_true(value));
        let connection = Connection::new(home.api, shared, path, is_writable, is_powersafe);
        // SAFETY: the memory that SQLite has for a file.
        unsafe { methods::open(file, connection) };
        Ok(flags)
    };
    let (flags_found, code) = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(flags)) => (flags, sqlite::OK),
        Ok(Err(OpenFailure::Refused(refusal))) => {
            home.api.log(sqlite::CANTOPEN, &refusal.text);
            // SAFETY: the memory that SQLite has for a file.
            unsafe { refused::refuse(file, refusal) };
            (flags, sqlite::OK)
        }
        Ok(Err(OpenFailure::Code(code))) => (flags, code),
        Err(_) => (flags, sqlite::CANTOPEN),
    };
    if !flags_out.is_null() {
        // SAFETY: SQLite's variable.
        unsafe { flags_out.write(flags_found) };
    }
    code
}

/// Forwards a call to the system's VFS, with its own pointer instead of this one's.
macro_rules! forward {
    ($($name:ident($($argument:ident: $type:ty),*) -> $answer:ty;)+) => {
        $(unsafe extern "C" fn $name(vfs: *mut Vfs, $($argument: $type),*) -> $answer {
            // SAFETY: SQLite calls with the VFS that was registered.
            let system = unsafe { home(vfs) }.system;
            // SAFETY: registered VFSs live as long as the library.
            let function = unsafe { (*system).$name };
            // SAFETY: the arguments that SQLite gave.
            unsafe { function(system, $($argument),*) }
        })+
    };
}

forward! {
    delete(name: *const c_char, sync_directory: c_int) -> c_int;
    access(name: *const c_char, flags: c_int, answer: *mut c_int) -> c_int;
    full_pathname(name: *const c_char, size: c_int, path: *mut c_char) -> c_int;
    dl_open(name: *const c_char) -> *mut c_void;
    dl_error(size: c_int, message: *mut c_char) -> ();
    dl_sym(library: *mut c_void, symbol: *const c_char) -> *mut c_void;
    dl_close(library: *mut c_void) -> ();
    randomness(size: c_int, bytes: *mut c_char) -> c_int;
    sleep(microseconds: c_int) -> c_int;
    current_time(days: *mut f64) -> c_int;
    last_error(size: c_int, message: *mut c_char) -> c_int;
}

unsafe extern "C" fn current_time_ms(vfs: *mut Vfs, milliseconds: *mut i64) -> c_int {
    // SAFETY: SQLite calls with the VFS that was registered.
    let system = unsafe { home(vfs) }.system;
    // SAFETY: registered VFSs live as long as the library.
    let function = unsafe { (*system).current_time_ms };
    // SAFETY: the variable that SQLite gave.
    function.map_or(sqlite::ERROR, |function| unsafe { function(system, milliseconds) })
}
