//! An open file: what all its handles share, and which further handles it admits.

use crate::error::{Error, ErrorKind, Result};
use crate::file::readahead::Fronts;
use crate::file::{FaultMode, OpenOptions};
use crate::inode::Inode;
use crate::io::{DirectBacking, DirectIo, DirectStatus, DiskFile};
use crate::sync::{AtomicU64, Backoff, Ordering};
use std::iter;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// Open file: its inode, and the counts of its handles by kind.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) inode: Arc<Inode>,
    pub(super) handles: u64,
    pub(super) writable: u64,
    pub(super) immutable: u64,
    /// Readahead that handles continue of one another.
    pub(super) fronts: Arc<Fronts>,
    /// Set if the last handle is closed and the file could not be made durable.
    pub(super) is_kept: bool,
    /// Open files of the backing (REGISTRY-2).
    pub(super) disks: Vec<Arc<DiskFile>>,
    /// Descriptors that callers passed and that are not used.
    pub(super) spare: Vec<OwnedFd>,
    /// Number of visits ([`Visit`](super::Visit)).
    pub(super) visitors: Arc<AtomicU64>,
}

impl Open {
    pub(super) fn new(inode: Arc<Inode>) -> Self {
        Self {
            inode,
            handles: 0,
            writable: 0,
            immutable: 0,
            fronts: Arc::default(),
            is_kept: false,
            disks: Vec::new(),
            spare: Vec::new(),
            visitors: Arc::default(),
        }
    }

    /// Waits until no visitor is left. The caller has taken the slot, so that none can come.
    pub(super) fn wait_for_visitors(&self) {
        let mut backoff = Backoff::default();
        // Acquire: pairs with the Release in the drop of `Stay`.
        while self.visitors.load(Ordering::Acquire) > 0 {
            backoff.wait();
        }
    }

    /// Returns an error if another handle with `options` conflicts with the open ones. Changes
    /// nothing.
    pub(super) fn admit(&self, options: &OpenOptions) -> Result<()> {
        let file = || self.inode.name();
        let (wanted, open) = match options {
            OpenOptions { immutable: true, .. } if self.writable > 0 => ("immutable", "writable"),
            OpenOptions { write: true, .. } if self.immutable > 0 => ("writable", "immutable"),
            _ => ("", ""),
        };
        if !wanted.is_empty() {
            let text = format!("{wanted}: it is open {open} in this cache");
            return Err(Error::conflict(file(), text));
        }
        if options.mappable {
            self.inode.page_space.mappable(file)?;
        }
        if let (Some(wanted), Some(mapped)) = (options.faults, &self.inode.mapped) {
            let is_in_thread = mapped.serves_in_thread();
            let open = if is_in_thread { FaultMode::InThread } else { FaultMode::Threads };
            if wanted != open {
                let text =
                    format!("with faults {wanted:?}: it is open in this cache with {open:?}");
                return Err(Error::conflict(file(), text));
            }
        }
        let has_same_codec = match (&options.codec, self.inode.codec.get()) {
            (Some(wanted), Some(open)) => open.is(wanted),
            (wanted, open) => wanted.is_none() && open.is_none(),
        };
        if !has_same_codec {
            let text = "with another codec: it is open in this cache with a different one, or none";
            return Err(Error::conflict(file(), text.to_owned()));
        }
        let (wanted, open) = (options.folio_bytes, self.inode.mapping.folio_bytes());
        if wanted != open {
            let text = format!("with folios of {wanted} bytes: it has {open}");
            return Err(Error::conflict(file(), text).numbered(libc::EINVAL));
        }
        let len_max = self.inode.len_max_bytes();
        if let Some(wanted) = options.len_max_bytes.filter(|wanted| *wanted > len_max) {
            let text = format!("with len_max {wanted}: it is open in this cache with {len_max}");
            return Err(Error::conflict(file(), text));
        }
        self.check_way(options.direct)
    }

    /// Binds the file to what another handle with `options`, already admitted, requires.
    pub(super) fn bind(&self, options: &OpenOptions) -> Result<()> {
        if options.direct == DirectIo::Require {
            self.disks.iter().for_each(|disk| disk.require_direct());
        }
        // A transfer may have fallen back since the check; from here on none does.
        self.check_way(options.direct)?;
        if options.exclusive { self.lock_exclusively() } else { Ok(()) }
    }

    /// Locks the file against other programs. It may be locked already.
    fn lock_exclusively(&self) -> Result<()> {
        if self.inode.is_memory_file() {
            return Ok(());
        }
        let Some(disk) = self.disks.iter().find(|disk| disk.is_writable()) else {
            let problem = "an exclusive lock needs a file opened by path or descriptor";
            return Err(Error::config("open options", problem).in_file(self.inode.name()));
        };
        disk.lock_exclusively().map_err(|source| match source.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => {
                let text = "cannot be opened exclusively: another program or cache has locked it";
                Error::new(ErrorKind::Locked, text).in_file(self.inode.name())
            }
            _ => Error::cannot_open(Path::new(&self.inode.name()), source),
        })
    }

    /// Fails if transfers are not direct, or buffered, as wanted.
    fn check_way(&self, wanted: DirectIo) -> Result<()> {
        // Of two backings of the file, the one used for writes may have fallen back and the other
        // not.
        let disks = self.disks.iter().map(|disk| disk.direct());
        let mut ways = iter::once(self.inode.store.direct()).chain(disks);
        let reason = match wanted {
            DirectIo::Require => ways.find_map(|way| match way {
                DirectStatus::Buffered { reason } => {
                    Some(format!("transfers go through the page cache: {reason}"))
                }
                DirectStatus::Custom => Some("its storage is a user-supplied backing".to_owned()),
                DirectStatus::Direct => None,
            }),
            DirectIo::Never if matches!(ways.next(), Some(DirectStatus::Direct)) => {
                Some("transfers go directly to the device".to_owned())
            }
            _ => None,
        };
        let Some(reason) = reason else { return Ok(()) };
        let text = format!("with {wanted:?}: it is open in this cache, and {reason}");
        Err(Error::conflict(self.inode.name(), text))
    }
}
