//! The guest's root file system: a cpio archive in the format `newc`, which the kernel unpacks into memory
//! (Documentation/driver-api/early-userspace/buffer-format.rst).
//!
//! Programs come from this machine, with the libraries that they are linked with: no second build, and the tests that
//! run in the guest are the very files that run here. A guest of another architecture has its own (`programs`).

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::programs::GuestPrograms;
use egress_toolchain::output;

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const PLAIN: u32 = 0o100_644;

/// An archive being written.
pub(super) struct Archive {
    file: BufWriter<File>,
    names: BTreeSet<PathBuf>,
    /// Work files, for programs without their debug information.
    scratch: PathBuf,
}

impl Archive {
    pub(super) fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).with_context(|| format!("create {}", path.display()))?;
        Ok(Self { file: BufWriter::new(file), names: BTreeSet::new(), scratch: path.with_extension("stripped") })
    }

    pub(super) fn folder(&mut self, path: &str) -> Result<()> {
        self.parents(&Path::new(path).join("-"))
    }

    pub(super) fn data(&mut self, path: &str, bytes: &[u8]) -> Result<()> {
        self.add(Path::new(path), PLAIN, bytes)
    }

    /// A plain file of this machine, in the same place.
    pub(super) fn file(&mut self, path: &Path) -> Result<()> {
        let bytes = fs::read(path).with_context(|| format!("read {}", path.display()))?;
        self.add(path, PLAIN, &bytes)
    }

    /// A file of this machine that may be run, in another place and without what it is linked with.
    pub(super) fn copy(&mut self, path: &Path, source: &Path) -> Result<()> {
        let bytes = fs::read(source).with_context(|| format!("read {}", source.display()))?;
        self.add(path, PROGRAM, &bytes)
    }

    /// A folder of this machine with its plain files, in the same place.
    pub(super) fn tree(&mut self, folder: &Path) -> Result<()> {
        for entry in fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))? {
            let path = entry.with_context(|| format!("read {}", folder.display()))?.path();
            if path.is_dir() { self.tree(&path)? } else { self.file(&path)? }
        }
        Ok(())
    }

    /// A program and its libraries, without debug information where there is a tool to take it off.
    pub(super) fn program(&mut self, programs: &GuestPrograms, path: &str, source: &Path) -> Result<()> {
        for (library, place) in programs.libraries(source)? {
            if !self.names.contains(&place) {
                let bytes = fs::read(&library).with_context(|| format!("read {}", library.display()))?;
                self.add(&place, PROGRAM, &bytes)?;
            }
        }
        let bytes = self.stripped(programs, source)?;
        self.add(Path::new(path), PROGRAM, &bytes)
    }

    fn stripped(&self, programs: &GuestPrograms, source: &Path) -> Result<Vec<u8>> {
        let mut file = source;
        if let Some(strip) = programs.strip() {
            let mut command = Command::new(strip);
            if output(command.arg("-g").arg("-o").arg(&self.scratch).arg(source)).is_ok() {
                file = &self.scratch;
            }
        }
        fs::read(file).with_context(|| format!("read {}", file.display()))
    }

    /// Adds it once; a library is asked for by many.
    fn add(&mut self, path: &Path, mode: u32, bytes: &[u8]) -> Result<()> {
        if self.names.contains(path) {
            return Ok(());
        }
        self.parents(path)?;
        self.entry(path, mode, bytes)
    }

    fn parents(&mut self, path: &Path) -> Result<()> {
        let mut missing: Vec<_> = path.ancestors().skip(1).filter(|folder| folder.parent().is_some()).collect();
        missing.reverse();
        for folder in missing {
            if !self.names.contains(folder) {
                self.entry(folder, FOLDER, &[])?;
            }
        }
        Ok(())
    }

    fn entry(&mut self, path: &Path, mode: u32, bytes: &[u8]) -> Result<()> {
        self.names.insert(path.to_path_buf());
        let name = path.strip_prefix("/").unwrap_or(path).to_string_lossy().into_owned();
        self.write(&name, mode, bytes).with_context(|| format!("write {name} into the archive"))
    }

    fn write(&mut self, name: &str, mode: u32, bytes: &[u8]) -> Result<()> {
        let number = |value: usize| u32::try_from(value).context("larger than the format allows");
        let inode = number(self.names.len())?;
        let fields = [inode, mode, 0, 0, 1, 0, number(bytes.len())?, 0, 0, 0, 0, number(name.len() + 1)?, 0];
        self.file.write_all(b"070701")?;
        for field in fields {
            write!(self.file, "{field:08x}")?;
        }
        self.file.write_all(name.as_bytes())?;
        self.file.write_all(&[0])?;
        const HEADER: usize = 110;
        self.pad(HEADER + name.len() + 1)?;
        self.file.write_all(bytes)?;
        self.pad(bytes.len())
    }

    /// Header with name, and content, are each filled up to four bytes.
    fn pad(&mut self, length: usize) -> Result<()> {
        Ok(self.file.write_all(&[0; 3][..length.wrapping_neg() % 4])?)
    }

    pub(super) fn finish(mut self) -> Result<()> {
        self.write("TRAILER!!!", 0, &[])?;
        self.file.flush().context("write the archive")?;
        match fs::remove_file(&self.scratch) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("remove {}", self.scratch.display()))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_in_the_kernels_format() {
        let path = std::env::temp_dir().join(format!("xtask-archive-{}", std::process::id()));
        let mut archive = Archive::create(&path).expect("create");
        archive.data("/etc/plan", b"hello").expect("a file");
        archive.folder("/etc").expect("is there already");
        archive.finish().expect("finish");
        let bytes = fs::read(&path).expect("read");
        fs::remove_file(&path).expect("remove");

        let mut rest = bytes.as_slice();
        let mut seen = Vec::new();
        while !rest.is_empty() {
            let field = |at: usize| {
                let text = std::str::from_utf8(&rest[6 + at * 8..14 + at * 8]).expect("digits");
                usize::from_str_radix(text, 16).expect("a number")
            };
            assert_eq!(&rest[..6], b"070701");
            let (mode, size, name) = (field(1), field(6), field(11));
            let content = (110 + name).next_multiple_of(4);
            seen.push((
                String::from_utf8_lossy(&rest[110..110 + name - 1]).into_owned(),
                mode,
                rest[content..content + size].to_vec(),
            ));
            rest = &rest[(content + size).next_multiple_of(4)..];
        }
        let expected = [("etc", FOLDER, &b""[..]), ("etc/plan", PLAIN, b"hello"), ("TRAILER!!!", 0, b"")];
        assert_eq!(
            seen,
            expected.map(|(name, mode, bytes)| (
                name.to_owned(),
                usize::try_from(mode).expect("small"),
                bytes.to_vec()
            ))
        );
    }
}
