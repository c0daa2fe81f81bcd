use std::process::ExitCode;

fn main() -> ExitCode {
    egress_agent::cmd::main()
}
