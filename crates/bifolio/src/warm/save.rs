//! Saving: which pages are in memory, and how hot they are.

use super::list::{self, COLDNESSES, KIND, ListedFile, RunsOut, USED_COLDNESSES};
use crate::error::{Error, ErrorKind, Result, io_error};
use crate::file::Registry;
use crate::inode::Inode;
use crate::io::FileIdentity;
use crate::page::{Flag, PAGE_BYTES};
use crate::sync::Ordering;
use crate::sys::file::{self, OpenMode};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Names that a temporary file may have, of which another program may use some.
const NAMES_MAX: u32 = 100;

/// Result of [`Cache::save_hot`](crate::Cache::save_hot).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SavedHot {
    /// Files with listed pages.
    pub files: u64,
    /// Listed pages, bytes.
    pub page_bytes: u64,
    /// Length of the list, bytes.
    pub list_bytes: u64,
}

/// Writes a list of the pages of all files to `path`, which names the former list or this one,
/// whatever happens meanwhile.
pub(crate) fn save(registry: &Registry, path: &Path) -> Result<SavedHot> {
    registry.check()?;
    let mut files = cached_files(registry);
    files.sort_by(|one, other| one.0.name.cmp(&other.0.name));
    let (mut listed, mut saved) = (Vec::new(), SavedHot::default());
    let mut bodies: [Vec<Vec<u8>>; COLDNESSES] = Default::default();
    for (file, inode) in files {
        let runs = runs_of(&inode, listed.len());
        let pages: u64 = runs.iter().map(|runs| runs.pages).sum();
        if pages == 0 {
            continue;
        }
        listed.push(file);
        saved.page_bytes += pages * PAGE_BYTES;
        for (all, runs) in bodies.iter_mut().zip(runs) {
            all.extend(runs.finish());
        }
    }
    let bytes = list::encode(&listed, bodies.into_iter().flatten());
    replace(path, &bytes)?;
    Ok(SavedHot { files: listed.len() as u64, list_bytes: bytes.len() as u64, ..saved })
}

/// Returns the files that an open finds again, open ones and closed ones that are kept.
fn cached_files(registry: &Registry) -> Vec<(ListedFile, Arc<Inode>)> {
    let file = |identity: FileIdentity, born_ns: Option<u64>, inode: Arc<Inode>| {
        let name = list::name_of(&inode.name()).to_owned();
        (ListedFile { identity, born_ns: born_ns.unwrap_or(0), name }, inode)
    };
    let open = registry.identities().into_iter().filter_map(|identity| {
        let visit = registry.visit(identity)?;
        Some(file(identity, visit.born_ns(), Arc::clone(&visit.inode)))
    });
    let kept = registry.keeper.iter().flat_map(|keeper| keeper.kept());
    open.chain(kept.map(|(identity, inode)| file(identity, None, inode))).collect()
}

/// Returns the resident pages of a file by their coldness.
fn runs_of(inode: &Inode, file: usize) -> [RunsOut; COLDNESSES] {
    let mut all = std::array::from_fn(|coldness| RunsOut::new(file, coldness));
    let (mapping, folios) = (&inode.mapping, &inode.memory.folios);
    let mut index = 0;
    while let Some(found) = mapping.table().next_folio(index) {
        let pages = mapping.head_index(found)..mapping.end_of_unit(found);
        index = pages.end;
        let flags = mapping.peek(folios, pages.start, |_, folio| {
            let is = |flag| folio.flags.get(flag);
            let is_listed = is(Flag::Uptodate) && !is(Flag::Readahead);
            (is_listed, is(Flag::Active))
        });
        let Ok((true, is_active)) = flags else { continue };
        // Relaxed: the mark is a hint.
        let load = |page| mapping.table().load(page, Ordering::Relaxed);
        let is_used = pages.clone().any(|page| load(page).is_referenced());
        let coldness = if is_used { 0 } else { USED_COLDNESSES } + usize::from(!is_active);
        all[coldness].push(pages);
    }
    all
}

/// Replaces the file at `path` by one of these bytes.
fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let Some(name) = path.file_name() else {
        let problem = format!("{}: no name of a file", path.display());
        return Err(Error::config("list of hot pages", problem));
    };
    let failed = |path: &Path, operation: &'static str| {
        let path = path.display().to_string();
        move |source| io_error(path, operation, None, source)
    };
    check_replaced(path)?;
    let (unfinished, mut file) = create_beside(path, name).map_err(failed(path, "creation"))?;
    let written = file
        .write_all(bytes)
        .map_err(failed(&unfinished, "write"))
        .and_then(|()| file.sync_all().map_err(failed(&unfinished, "sync")))
        .and_then(|()| fs::rename(&unfinished, path).map_err(failed(path, "rename")));
    if let Err(error) = written {
        let _ = fs::remove_file(&unfinished);
        return Err(error);
    }
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    file::sync_directory(directory).map_err(failed(directory, "sync"))
}

/// Fails if there is a file at `path` that is no list: a wrong path must not cost a database.
fn check_replaced(path: &Path) -> Result<()> {
    let found = match open_list(path) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(()),
        found => found?,
    };
    let mut start = Vec::new();
    let read = found.take(KIND.len() as u64).read_to_end(&mut start);
    read.map_err(|source| io_error(path.display().to_string(), "read", None, source))?;
    if start.is_empty() || start == KIND {
        return Ok(());
    }
    let problem = "it has something else than a list of hot pages, and is not replaced";
    Err(Error::config("list of hot pages", problem).in_file(path.display().to_string()))
}

/// Opens the file at `path`, which must be a regular one.
pub(super) fn open_list(path: &Path) -> Result<fs::File> {
    let cannot_open = |source| Error::cannot_open(path, source);
    let mode = OpenMode { read: true, write: false, create: None, direct: false };
    let opened = file::open(path, mode).map_err(cannot_open)?;
    if let Some(kind) = file::status(opened.as_fd()).map_err(cannot_open)?.other_kind {
        let text = format!("{kind}, not a list of hot pages");
        return Err(Error::new(ErrorKind::NotRegular, text).in_file(path.display().to_string()));
    }
    Ok(fs::File::from(opened))
}

/// Creates a file with a name of its own beside `path`.
fn create_beside(path: &Path, name: &OsStr) -> io::Result<(PathBuf, fs::File)> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    for _ in 0..NAMES_MAX {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut other = OsString::from(name);
        other.push(format!(".{}-{number}.tmp", process::id()));
        let other = path.with_file_name(other);
        match file::create_private(&other) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => return Ok((other, fs::File::from(created?))),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}
