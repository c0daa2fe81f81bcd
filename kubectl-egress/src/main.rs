use std::process::ExitCode;

fn main() -> ExitCode {
    kubectl_egress::main()
}
