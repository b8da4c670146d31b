from diffusion_backend.cli import main

main()
