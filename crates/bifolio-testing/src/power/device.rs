//! The device of a [`PowerDisk`](super::PowerDisk): its bytes, and what of them no flush covers.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, MutexGuard};

use fastrand::Rng;

/// Bytes that a device writes in one piece.
const SECTOR_BYTES: usize = 512;

type Sector = [u8; SECTOR_BYTES];

/// A device with a volatile cache.
#[derive(Debug)]
pub(super) struct Device {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The bytes that a read returns.
    bytes: Vec<u8>,
    /// The bytes that each sector had before each of its writes since the last flush; the first
    /// ones are durable.
    older: HashMap<usize, Vec<Sector>>,
    /// Writes and flushes until the cut.
    left: u64,
    is_cut: bool,
    forgets_flushes: bool,
    lost: u64,
    kept: u64,
    random: Rng,
}

impl Device {
    pub(super) fn new(bytes: usize, seed: u64) -> Self {
        let state = State {
            bytes: vec![0; bytes],
            older: HashMap::new(),
            left: u64::MAX,
            is_cut: false,
            forgets_flushes: false,
            lost: 0,
            kept: 0,
            random: Rng::with_seed(seed),
        };
        Self { state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }

    pub(super) fn len(&self) -> usize {
        self.state().bytes.len()
    }

    pub(super) fn cut_after(&self, requests: u64) {
        self.state().left = requests;
    }

    pub(super) fn cut(&self) {
        self.state().cut();
    }

    pub(super) fn is_cut(&self) -> bool {
        self.state().is_cut
    }

    pub(super) fn lost_and_kept(&self) -> (u64, u64) {
        let state = self.state();
        (state.lost, state.kept)
    }

    pub(super) fn forget_flushes(&self) {
        self.state().forgets_flushes = true;
    }

    pub(super) fn restart(&self) {
        let mut state = self.state();
        (state.is_cut, state.left) = (false, u64::MAX);
    }

    /// Returns the bytes at `position`, fewer at the end.
    pub(super) fn read(&self, position: usize, length: usize) -> Vec<u8> {
        let state = self.state();
        let end = position.saturating_add(length).min(state.bytes.len());
        state.bytes.get(position..end).unwrap_or_default().to_vec()
    }

    pub(super) fn write(&self, position: usize, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.state();
        state.count()?;
        let end = position.saturating_add(bytes.len());
        if end > state.bytes.len() {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        for number in position / SECTOR_BYTES..end.div_ceil(SECTOR_BYTES) {
            let before = state.sector(number);
            state.older.entry(number).or_default().push(before);
        }
        state.bytes[position..end].copy_from_slice(bytes);
        Ok(())
    }

    pub(super) fn flush(&self) -> io::Result<()> {
        let mut state = self.state();
        state.count()?;
        if !state.forgets_flushes {
            state.older.clear();
        }
        Ok(())
    }
}

impl State {
    /// Counts a request; after the cut it fails.
    fn count(&mut self) -> io::Result<()> {
        if self.left == 0 {
            self.cut();
        }
        if self.is_cut {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.left -= 1;
        Ok(())
    }

    fn sector(&self, number: usize) -> Sector {
        let bytes = &self.bytes[number * SECTOR_BYTES..][..SECTOR_BYTES];
        bytes.try_into().expect("as many bytes")
    }

    /// Keeps each write that no flush covers or not. All of them, most, half, few or none: a device
    /// may have written its cache out just before.
    fn cut(&mut self) {
        if self.is_cut {
            return;
        }
        self.is_cut = true;
        let percent = self.random.choice([0, 5, 50, 95, 100]).unwrap_or(50);
        let mut older: Vec<_> = self.older.drain().collect();
        // The order of a map is not that of the seed.
        older.sort_unstable_by_key(|(number, _)| *number);
        for (number, before) in older {
            if self.random.u32(0..100) < percent {
                self.kept += 1;
                continue;
            }
            let which = if self.random.bool() { 0 } else { self.random.usize(0..before.len()) };
            self.bytes[number * SECTOR_BYTES..][..SECTOR_BYTES].copy_from_slice(&before[which]);
            self.lost += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_takes_only_what_no_flush_covers() {
        for seed in 0..40 {
            let device = Device::new(64 * SECTOR_BYTES, seed);
            device.write(0, &[1; 64 * SECTOR_BYTES]).unwrap();
            device.flush().unwrap();
            device.write(0, &[2; 32 * SECTOR_BYTES]).unwrap();
            device.write(0, &[3; 16 * SECTOR_BYTES]).unwrap();
            device.cut();
            let found = device.read(0, 64 * SECTOR_BYTES);
            for (number, sector) in found.chunks(SECTOR_BYTES).enumerate() {
                let most = if number < 16 { 3 } else { 1 + u8::from(number < 32) };
                assert!((1..=most).contains(&sector[0]), "{seed} {number} {}", sector[0]);
                assert!(sector.iter().all(|byte| *byte == sector[0]), "torn");
            }
            let (lost, kept) = device.lost_and_kept();
            assert_eq!(lost + kept, 32);
        }
    }

    #[test]
    fn a_device_without_power_acknowledges_nothing() {
        let device = Device::new(SECTOR_BYTES, 1);
        device.cut_after(2);
        device.write(0, &[1]).unwrap();
        device.flush().unwrap();
        assert!(!device.is_cut());
        assert!(device.write(0, &[2]).is_err() && device.is_cut() && device.flush().is_err());
        assert_eq!(device.read(0, 1), [1]);
        device.restart();
        device.write(0, &[3]).unwrap();
        assert_eq!(device.read(0, 1), [3]);
    }
}
