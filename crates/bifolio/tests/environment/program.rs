//! A small program as a user might write it: files of the disk, a memory file that is swapped out,
//! maps of both modes, with eight times as many bytes as memory.
//!
//! # Safety
//! Only this program uses its files, and it truncates none of them.
#![allow(unsafe_code)]

use std::path::Path;

use bifolio::{Cache, CacheBuilder, OpenOptions};

use crate::setup::{load, store, touch};
use crate::support::{PAGE, assert_same, read_all, writable};

pub const MEMORY: u64 = 512 << 10;
const LENGTH: u64 = 8 * MEMORY;

pub type Answer = Result<(), Box<dyn std::error::Error>>;

/// Variant of the program.
#[derive(Clone, Copy, Debug)]
pub struct Program<'d> {
    pub directory: &'d Path,
    /// Set to use as little address space as possible.
    pub is_small: bool,
}

fn bytes() -> Vec<u8> {
    bifolio_testing::fill_bytes(7, LENGTH as usize)
}

impl Program<'_> {
    fn builder(self) -> CacheBuilder {
        let builder = Cache::builder().memory(MEMORY);
        if !self.is_small {
            return builder;
        }
        builder.memory_max(MEMORY).swap_max(4 * LENGTH)
    }

    fn sized(self, options: OpenOptions) -> OpenOptions {
        if self.is_small { options.len_max(LENGTH) } else { options }
    }

    pub fn use_files(self) -> Answer {
        let path = self.directory.join("plain");
        let expected = bytes();
        std::fs::write(&path, vec![0; LENGTH as usize])?;
        let cache = self.builder().build()?;
        let file = cache.open(&path, &self.sized(writable()))?;
        for (part, position) in expected.chunks(10_000).zip((0..).step_by(10_000)) {
            file.write_all_at(part, position)?;
        }
        file.sync_data()?;
        assert_same(&read_all(&file), &expected);
        assert_same(&std::fs::read(&path)?, &expected);
        let mut buffers = [[0_u8; 100]; 50];
        let mut requests: Vec<_> = buffers
            .iter_mut()
            .zip(0_u64..)
            .map(|(buffer, at)| bifolio::ReadRequest::new(buffer, at * 80_000))
            .collect();
        file.read_many(&mut requests)?;
        drop(requests);
        for (buffer, at) in buffers.iter().zip(0..) {
            assert_same(buffer, &expected[at * 80_000..][..100]);
        }
        drop(file);
        Ok(cache.close()?)
    }

    pub fn use_swap(self) -> Answer {
        let cache = self.builder().swap_directory(self.directory).build()?;
        let file = cache.memory_file_with("scratch", &self.sized(writable()))?;
        file.write_all_at(&bytes(), 0)?;
        assert_same(&read_all(&file), &bytes());
        drop(file);
        Ok(cache.close()?)
    }

    pub fn read_map(self) -> Answer {
        let path = self.directory.join("mapped");
        let expected = bytes();
        std::fs::write(&path, &expected)?;
        let cache = self.builder().build()?;
        let file = cache.open(&path, &self.sized(OpenOptions::new().mappable(true)))?;
        let map = file.map(0..LENGTH)?;
        assert_same(&load(map.as_ptr(), 0..LENGTH), &expected);
        drop((map, file));
        Ok(cache.close()?)
    }

    pub fn write_map(self) -> Answer {
        let path = self.directory.join("mapped for writing");
        std::fs::write(&path, vec![1; LENGTH as usize])?;
        let cache = self.builder().build()?;
        let file = cache.open(&path, &self.sized(writable().mappable(true)))?;
        let mut map = file.map_mut(0..LENGTH)?;
        for position in (0..LENGTH).step_by(PAGE as usize) {
            store(map.as_mut_ptr(), position, &position.to_ne_bytes());
        }
        map.sync(0..LENGTH)?;
        for position in (0..LENGTH).step_by(PAGE as usize) {
            assert_eq!(load(map.as_ptr(), position..position + 8), position.to_ne_bytes());
            assert_eq!(touch(map.as_ptr(), position + 8), 1);
        }
        drop(map);
        let expected = read_all(&file);
        assert_same(&std::fs::read(&path)?, &expected);
        drop(file);
        Ok(cache.close()?)
    }
}
